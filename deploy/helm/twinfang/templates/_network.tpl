{{/* Parts of network policies. */}}

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
