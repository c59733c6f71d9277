{{/* Names and labels. */}}

{{/* At most 34 characters: with "-prefill-" and a pool's name of 20 it still fits into a label's 63. */}}
{{- define "twinfang.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 34 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 34 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 34 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The selector of all pods of this release. It never changes during the release's life. */}}
{{- define "twinfang.selector" -}}
app.kubernetes.io/name: twinfang
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Labels of every pod. They contain no version, so a new version of the chart or of the application alone restarts no pod. */}}
{{- define "twinfang.podLabels" -}}
{{ include "twinfang.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: twinfang
{{- end -}}

{{/* Labels of every other object. */}}
{{- define "twinfang.labels" -}}
{{ include "twinfang.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The model's name for clients. */}}
{{- define "twinfang.model" -}}
{{- .Values.model.name | default (.Values.model.directory | base | trimPrefix ".") | default "bundled_model" -}}
{{- end -}}

{{/* The same name in a form that a label allows. Routers convert it in the same way. */}}
{{- define "twinfang.modelLabel" -}}
{{- regexReplaceAll "[^A-Za-z0-9._-]" (include "twinfang.model" .) "-" | trunc 63 | trimAll "-_." -}}
{{- end -}}

{{/* An image's reference. Takes a dictionary with image and root. */}}
{{- define "twinfang.image" -}}
{{- with .image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.root.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}
