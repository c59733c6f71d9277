{{/*
How many pods of one kind may be evicted at a time: of a dictionary with root, name, selector and budget, and isGroup of pods
that end together: what is left of a group that is down already may go, too.
*/}}
{{- define "twinfang.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "twinfang.labels" .root | nindent 4 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  {{- if .isGroup }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  {{- end }}
  selector:
    matchLabels: {{- .selector | nindent 6 }}
{{- end -}}
