{{/* Parts of network policies. */}}

{{/* The address on which processes listen: all addresses of the pod's family, or of both families. */}}
{{- define "twinfang.anyHost" -}}
{{- $both := or (has "IPv6" .Values.ipFamilies) (hasSuffix "DualStack" .Values.ipFamilyPolicy) -}}
{{- ternary "::" "0.0.0.0" (or (eq .Values.ipFamily "IPv6") $both) -}}
{{- end -}}

{{/* The families of a Service's addresses. */}}
{{- define "twinfang.serviceFamilies" -}}
{{- with .Values.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.ipFamilies }}
ipFamilies: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Prefill and decode servers of this release, as a selector. */}}
{{- define "twinfang.serverPeers" -}}
matchLabels: {{- include "twinfang.selector" . | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [prefill, decode]
{{- end -}}

{{/* The same, plus pods that run a part of a server: other servers read its state there, and it reads theirs. */}}
{{- define "twinfang.rankPeers" -}}
matchLabels: {{- include "twinfang.selector" . | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [prefill, prefill-worker, decode, decode-worker]
{{- end -}}

{{/* The port's number, because not every network plugin supports port names in egress rules. */}}
{{- define "twinfang.grpcPorts" -}}
{{ include "twinfang.policyPorts" (dict "root" . "role" "prefill" "of" "twinfang.serverPort") }}
{{ include "twinfang.policyPorts" (dict "root" . "role" "decode" "of" "twinfang.serverPort") }}
{{- end -}}

{{/* The ports of all servers of a pod. Takes a dictionary with root, role and of, which gives the first server's port. */}}
{{- define "twinfang.policyPorts" -}}
{{- $first := include .of .role | int -}}
{{- $number := include "twinfang.mostServers" . | int -}}
- port: {{ $first }}
{{- if gt $number 1 }}
  endPort: {{ sub (add $first $number) 1 }}
{{- end }}
{{- end -}}

{{/* Ports between servers: gRPC for handshakes and leases, and UCX's ports. Network policies don't apply to RDMA. */}}
{{- define "twinfang.exchangePorts" -}}
{{- $range := splitList "-" .Values.nixl.portRange -}}
{{ include "twinfang.grpcPorts" . }}
- port: {{ first $range }}
  endPort: {{ last $range }}
{{- end -}}

{{- define "twinfang.metricsPorts" -}}
{{ include "twinfang.policyPorts" (dict "root" . "role" "prefill" "of" "twinfang.serverMetricsPort") }}
{{ include "twinfang.policyPorts" (dict "root" . "role" "decode" "of" "twinfang.serverMetricsPort") }}
{{- end -}}

{{/* Who reads metrics: Prometheus, and the planner of pool sizes. */}}
{{- define "twinfang.metricsReaders" -}}
- namespaceSelector: {{- toYaml .Values.networkPolicy.monitoringNamespaceSelector | nindent 4 }}
{{- if .Values.autoscale.enabled }}
- podSelector:
    matchLabels: {{- include "twinfang.autoscaleSelector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "twinfang.egressToApiServer" -}}
- ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - port: {{ . }}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer.cidrs }}
  to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* Egress of routers and servers to the collector of traces: any address, on its port. */}}
{{- define "twinfang.egressToCollector" -}}
{{- with .Values.tracing.otlpEndpoint }}
{{- $port := regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" | default (hasPrefix "https:" . | ternary "443" "80") }}
- ports:
    - port: {{ $port }}
{{- end }}
{{- end -}}

{{/* Egress of routers to the store of keys' limits: any address, on its port. */}}
{{- define "twinfang.egressToLimitStore" -}}
{{- with .Values.auth.limitStore }}
{{- if or .url .existingSecret }}
- ports:
    - port: {{ ternary (regexFind ":[0-9]+$" (urlParse .url).host | trimPrefix ":" | default "6379") .port (ne (.url | default "") "") }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Egress to where models are fetched from: any address, on the ports of the sources. */}}
{{- define "twinfang.egressToSources" -}}
{{- $ports := list -}}
{{- range .served -}}
{{- with .Values.model.download -}}
{{- if .source -}}
{{- $url := ternary ((.env | default dict).AWS_ENDPOINT_URL | default "https://s3") .source (hasPrefix "s3:" .source) -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" (urlParse $url).host | trimPrefix ":" | default (hasPrefix "https:" $url | ternary "443" "80")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $ports | uniq }}
- ports:
    {{- range . }}
    - port: {{ . }}
    {{- end }}
{{- end }}
{{- end -}}

{{- define "twinfang.egressOfAll" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
