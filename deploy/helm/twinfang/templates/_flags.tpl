{{/* Command lines and environments. */}}

{{/* A value as text. Helm treats whole numbers as floats and would write a million as 1e+06. */}}
{{- define "twinfang.text" -}}
{{- if kindIs "float64" . -}}{{ toJson . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}

{{/* A dictionary of flags as a list of arguments: true gives the flag alone, false nothing, a list one argument per item. */}}
{{- define "twinfang.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name (include "twinfang.text" .) | quote }}
{{- end }}
{{- else if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $name (include "twinfang.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "twinfang.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ include "twinfang.text" $value | quote }}
{{- end }}
{{- end -}}
