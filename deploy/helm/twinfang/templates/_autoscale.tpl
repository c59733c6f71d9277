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
{{- if (include "twinfang.routerTls" . | fromYaml).secretName }}
- {{ printf "--router-server-name=%s" (include "twinfang.routerTls" . | fromYaml).serverName | quote }}
{{- if (include "twinfang.routerTls" . | fromYaml).caKey }}
- --router-ca-file=/etc/twinfang/router-ca/ca.crt
{{- end }}
{{- end }}
{{- if .Values.autoscale.routerToken.existingSecret }}
- {{ printf "--router-token-file=/etc/twinfang/router-token/%s" .Values.autoscale.routerToken.key | quote }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- range $i := until (include "twinfang.mostServers" (dict "root" $ "role" $role) | int) }}
- --{{ $role }}-metrics={{ include "twinfang.serverScheme" $ | lower }}://{{ $name }}-{{ $role }}:{{ add (include "twinfang.serverMetricsPort" $role | int) $i }}/metrics
{{- end }}
{{- if $.Values.autoscale.apply }}
- --{{ $role }}-deployment={{ include "twinfang.onlyPool" (dict "root" $ "role" $role) }}
{{- end }}
{{- end }}
{{- include "twinfang.tlsArguments" (dict "root" . "role" "operator") }}
{{- if .Values.autoscale.apply }}
- --kubernetes-namespace={{ .Release.Namespace }}
- --apply
{{- end }}
{{- include "twinfang.flags" .Values.autoscale.flags }}
{{- end -}}
