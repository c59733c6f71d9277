{{/*
How many pods of one kind may be evicted at a time. A pod that is not ready serves nobody, so it may always be evicted:
otherwise pods that never start keep their nodes from being drained. Takes a dictionary with root, name, selector and budget.
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
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- .selector | nindent 6 }}
{{- end -}}
