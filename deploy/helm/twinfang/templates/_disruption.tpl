{{/* How many pods of one kind may be evicted at a time: of a dictionary with root, name, selector and budget. */}}
{{- define "twinfang.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "twinfang.labels" .root | nindent 4 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  selector:
    matchLabels: {{- .selector | nindent 6 }}
{{- end -}}
