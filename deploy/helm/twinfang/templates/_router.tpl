{{/* The router. */}}

{{- define "twinfang.routerSelector" -}}
{{ include "twinfang.selector" . }}
app.kubernetes.io/component: router
{{- end -}}

{{/* The longest time of a request, in whole seconds; 600 without the flag, like the router's default. */}}
{{- define "twinfang.requestTimeout" -}}
{{- get (.Values.router.flags | default dict) "request-timeout" | default 600 | float64 | ceil | int -}}
{{- end -}}

{{- define "twinfang.shutdownGrace" -}}
{{- .Values.router.shutdownGraceSeconds | default (include "twinfang.requestTimeout" .) -}}
{{- end -}}

{{/* The seconds within which the servers of the slowest pool must be ready. */}}
{{- define "twinfang.slowestStart" -}}
{{- $slowest := .Values.poolDefaults.startTimeoutSeconds -}}
{{- range $pools := list .Values.prefillPools .Values.decodePools -}}
{{- range $pool := $pools -}}
{{- $slowest = max $slowest (($pool | default dict).startTimeoutSeconds | default 0) -}}
{{- end -}}
{{- end -}}
{{- $slowest -}}
{{- end -}}

{{- define "twinfang.routerArguments" -}}
- router
- {{ printf "--host=%s" (include "twinfang.anyHost" .) | quote }}
- --port=8000
{{- with include "twinfang.modelPath" . }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
- {{ printf "--served-model-name=%s" (include "twinfang.model" .) | quote }}
- --kubernetes-namespace={{ .Release.Namespace }}
- --kubernetes-selector=app.kubernetes.io/instance={{ .Release.Name }},twinfang.io/role
- --shutdown-grace={{ include "twinfang.shutdownGrace" . }}
{{- if or .Values.auth.apiKeys.existingSecret .Values.auth.apiKeys.lines }}
- {{ printf "--api-keys-file=/etc/twinfang/api-keys/%s" .Values.auth.apiKeys.key | quote }}
{{- end }}
{{- if or .Values.auth.adminToken.existingSecret .Values.auth.adminToken.digest }}
- {{ printf "--admin-token-file=/etc/twinfang/admin-token/%s" .Values.auth.adminToken.key | quote }}
{{- end }}
{{- with .Values.tracing.otlpEndpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
{{- include "twinfang.flags" .Values.router.flags }}
{{- end -}}
