{{/* The planner of pool sizes. */}}

{{- define "twinfang.autoscaleSelector" -}}
{{ include "twinfang.selector" . }}
app.kubernetes.io/component: autoscale
{{- end -}}

{{/* The name of the only Deployment of a role. Takes a dictionary with root and role. */}}
{{- define "twinfang.onlyPool" -}}
{{- $pools := get .root.Values (printf "%sPools" .role) -}}
{{- include "twinfang.poolName" (dict "root" .root "role" .role "name" (first (keys $pools))) -}}
{{- end -}}

{{- define "twinfang.autoscaleArguments" -}}
{{- $name := include "twinfang.fullname" . -}}
- autoscale
- {{ printf "--host=%s" (include "twinfang.anyHost" .) | quote }}
- --metrics-port=18300
- --router-metrics={{ include "twinfang.routerScheme" . | lower }}://{{ $name }}-router-metrics:8000/metrics
{{- if .Values.router.tls.secretName }}
- {{ printf "--router-server-name=%s" .Values.router.tls.serverName | quote }}
{{- if .Values.router.tls.caKey }}
- --router-ca-file=/etc/twinfang/router-ca/ca.crt
{{- end }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- range $i := until (include "twinfang.mostServers" (dict "root" $ "role" $role) | int) }}
- --{{ $role }}-metrics=http://{{ $name }}-{{ $role }}:{{ add (include "twinfang.serverMetricsPort" $role | int) $i }}/metrics
{{- end }}
{{- if $.Values.autoscale.apply }}
- --{{ $role }}-deployment={{ include "twinfang.onlyPool" (dict "root" $ "role" $role) }}
{{- end }}
{{- end }}
{{- if .Values.autoscale.apply }}
- --kubernetes-namespace={{ .Release.Namespace }}
- --apply
{{- end }}
{{- include "twinfang.flags" .Values.autoscale.flags }}
{{- end -}}
