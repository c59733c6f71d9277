{{/*
How many pods of one kind may be evicted at a time. Takes a dictionary with root, name, selector and budget, and isGroup for
pods that end together: if a group is already down, its remaining pods may be evicted too.
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
