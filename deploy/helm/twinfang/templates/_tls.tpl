{{/* Mutual TLS between processes. Roles are router, server and operator, as in --tls-names. */}}

{{/* The names in certificates: {role} stands for the role. */}}
{{- define "twinfang.tlsNames" -}}
{{- .Values.tls.names | default (printf "{role}.%s.%s.svc" (include "twinfang.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{/* The name of a role. Takes a dictionary with root and role. */}}
{{- define "twinfang.tlsName" -}}
{{- include "twinfang.tlsNames" .root | replace "{role}" .role -}}
{{- end -}}

{{/* The Secret of a role: that of the values, or the one that cert-manager fills. Takes a dictionary with root and role. */}}
{{- define "twinfang.tlsSecret" -}}
{{- get .root.Values.tls.secrets .role | default (printf "%s-tls-%s" (include "twinfang.fullname" .root) .role) -}}
{{- end -}}

{{/* Flags of a process of a role. Takes a dictionary with root and role. */}}
{{- define "twinfang.tlsArguments" -}}
{{- if .root.Values.tls.enabled }}
{{- range $flag, $file := dict "cert" "tls.crt" "key" "tls.key" "ca" "ca.crt" }}
- --tls-{{ $flag }}=/etc/twinfang/tls-{{ $.role }}/{{ $file }}
{{- end }}
- {{ printf "--tls-names=%s" (include "twinfang.tlsNames" .root) | quote }}
{{- end }}
{{- end -}}

{{/* Mounts of the Secrets of roles. Takes a dictionary with root and roles. */}}
{{- define "twinfang.tlsMounts" -}}
{{- if .root.Values.tls.enabled }}
{{- range .roles }}
- name: tls-{{ . }}
  mountPath: /etc/twinfang/tls-{{ . }}
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "twinfang.tlsVolumes" -}}
{{- if .root.Values.tls.enabled }}
{{- range .roles }}
- name: tls-{{ . }}
  secret:
    secretName: {{ include "twinfang.tlsSecret" (dict "root" $.root "role" .) }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end -}}

{{/* HTTP or HTTPS, as probes of servers write it. */}}
{{- define "twinfang.serverScheme" -}}
{{- ternary "HTTPS" "HTTP" .Values.tls.enabled -}}
{{- end -}}

{{/* How Prometheus reads the metrics of a role. Takes a dictionary with root and role. */}}
{{- define "twinfang.tlsScrape" -}}
{{- $secret := include "twinfang.tlsSecret" (dict "root" .root "role" "operator") -}}
scheme: https
tlsConfig:
  serverName: {{ include "twinfang.tlsName" . | quote }}
  ca:
    secret: {name: {{ $secret }}, key: ca.crt}
  cert:
    secret: {name: {{ $secret }}, key: tls.crt}
  keySecret: {name: {{ $secret }}, key: tls.key}
{{- end -}}

{{- define "twinfang.tlsChecks" -}}
{{- with .Values.tls -}}
{{- if .enabled -}}
{{- $given := list -}}
{{- range $role, $name := .secrets -}}{{- if $name -}}{{- $given = append $given $role -}}{{- end -}}{{- end -}}
{{- if and .issuerRef.name $given -}}
{{- fail "tls: cert-manager's issuer (issuerRef) and Secrets (secrets) are both given; leave one of the two out" -}}
{{- end -}}
{{- if and (not .issuerRef.name) (ne (len $given) 3) -}}
{{- fail "tls.enabled: set tls.issuerRef to an issuer of cert-manager, or tls.secrets.router, .server and .operator to Secrets with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and .names (not (contains "{role}" .names)) -}}
{{- fail (printf "tls.names %s: {role} has to stand in it, as in {role}.twinfang.example.com" .names) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* HTTPS of routers: what the values say, or the routers' own certificate if processes have mutual TLS. */}}
{{- define "twinfang.routerTls" -}}
{{- if and .Values.tls.enabled (not .Values.router.tls.secretName) -}}
{{- dict "secretName" (include "twinfang.tlsSecret" (dict "root" . "role" "router")) "serverName" (include "twinfang.tlsName" (dict "root" . "role" "router")) "caKey" "ca.crt" | toYaml -}}
{{- else -}}
{{- .Values.router.tls | toYaml -}}
{{- end -}}
{{- end -}}
