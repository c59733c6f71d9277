{{/* Parts of network policies. */}}

{{/* What processes listen on: all addresses of the pod's family. */}}
{{- define "twinfang.anyHost" -}}
{{- ternary "::" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{/* Prefill and decode servers of this release, as a selector. */}}
{{- define "twinfang.serverPeers" -}}
matchLabels: {{- include "twinfang.selector" . | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [prefill, decode]
{{- end -}}

{{/* By number: not every network plugin knows names of ports in egress rules. */}}
{{- define "twinfang.grpcPorts" -}}
- port: {{ include "twinfang.serverPort" "prefill" }}
- port: {{ include "twinfang.serverPort" "decode" }}
{{- end -}}

{{/* Between servers: handshakes and leases over gRPC, and what UCX listens on. RDMA passes by all policies. */}}
{{- define "twinfang.exchangePorts" -}}
{{- $range := splitList "-" .Values.nixl.portRange -}}
{{ include "twinfang.grpcPorts" . }}
- port: {{ first $range }}
  endPort: {{ last $range }}
{{- end -}}

{{- define "twinfang.metricsPorts" -}}
- port: {{ include "twinfang.serverMetricsPort" "prefill" }}
- port: {{ include "twinfang.serverMetricsPort" "decode" }}
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

{{/* Of routers and servers, to the collector of traces: any address, on its port. */}}
{{- define "twinfang.egressToCollector" -}}
{{- with .Values.tracing.otlpEndpoint }}
{{- $port := regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" | default (hasPrefix "https:" . | ternary "443" "80") }}
- ports:
    - port: {{ $port }}
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
