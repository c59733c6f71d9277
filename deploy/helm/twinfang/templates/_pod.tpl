{{/* The parts that pods of routers and of servers have in common. */}}

{{/* Where a pod may run. Takes a dictionary with values (a pool's or the router's) and selector (of its pods). */}}
{{- define "twinfang.placement" -}}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (mergeOverwrite (dict "labelSelector" (dict "matchLabels" ($.selector | fromYaml))) .) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* No privileges; only volumes are writable. */}}
{{- define "twinfang.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A Deployment's strategy. Takes a dictionary like router.strategy. */}}
{{- define "twinfang.strategy" -}}
type: {{ .type }}
{{- if eq .type "RollingUpdate" }}
rollingUpdate: {{- toYaml .rollingUpdate | nindent 2 }}
{{- end }}
{{- end -}}
