{{/*
The Prometheus metrics by which pools are scaled. All templates take a pool's dictionary.

The adapter's rules in deploy/observability/prometheus-adapter.yaml are the same queries, for each pod.
*/}}

{{/* The selector of the pool's series. The service's name contains release and role. */}}
{{- define "twinfang.poolSeries" -}}
namespace="{{ .root.Release.Namespace }}",service="{{ include "twinfang.fullname" .root }}-{{ .role }}",pool="{{ .name }}"
{{- end -}}

{{/* A histogram's mean over two minutes, 0 without observations. Takes a dictionary with series and histogram. */}}
{{- define "twinfang.meanQuery" -}}
sum(rate({{ .histogram }}_sum{ {{- .series -}} }[2m])) / (sum(rate({{ .histogram }}_count{ {{- .series -}} }[2m])) > 0) or vector(0)
{{- end -}}

{{/* A list of measures: metric is the custom metrics API's name, query gives the pool's value, target is the wanted value. */}}
{{- define "twinfang.measures" -}}
{{- $series := include "twinfang.poolSeries" . -}}
{{- $scaling := .pool.autoscaling -}}
{{- if eq .role "prefill" }}
- metric: twinfang_request_queue_seconds_mean
  query: {{ include "twinfang.meanQuery" (dict "series" $series "histogram" "twinfang_request_queue_seconds") | quote }}
  target: {{ include "twinfang.text" $scaling.queueSeconds | quote }}
{{- else }}
- metric: twinfang_rows_used_percent
  query: {{ printf "100 * sum(twinfang_requests_running{%s}) / sum(twinfang_rows{%s})" $series $series | quote }}
  target: {{ $scaling.usedPercent | toString | quote }}
- metric: twinfang_kv_blocks_used_percent
  query: {{ printf "100 * (1 - sum(twinfang_kv_blocks_free{%s}) / sum(twinfang_kv_blocks{%s}))" $series $series | quote }}
  target: {{ $scaling.usedPercent | toString | quote }}
{{- if $scaling.tokenSeconds }}
- metric: twinfang_inter_token_latency_seconds_mean
  query: {{ include "twinfang.meanQuery" (dict "series" $series "histogram" "twinfang_inter_token_latency_seconds") | quote }}
  target: {{ include "twinfang.text" $scaling.tokenSeconds | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "twinfang.horizontalPodAutoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "twinfang.poolName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "twinfang.labels" .root | nindent 4 }}
spec:
  scaleTargetRef: {{- include "twinfang.scaleTarget" . | nindent 4 }}
  minReplicas: {{ .pool.autoscaling.minReplicas }}
  maxReplicas: {{ .pool.autoscaling.maxReplicas }}
  metrics:
    {{- range include "twinfang.measures" . | fromYamlArray }}
    - type: Pods
      pods:
        metric:
          name: {{ .metric }}
        target:
          type: AverageValue
          averageValue: {{ .target | quote }}
    {{- end }}
  {{- with .pool.autoscaling.behavior }}
  behavior: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "twinfang.scaledObject" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "twinfang.poolName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "twinfang.labels" .root | nindent 4 }}
spec:
  scaleTargetRef: {{- include "twinfang.scaleTarget" . | nindent 4 }}
  pollingInterval: {{ .root.Values.keda.pollingIntervalSeconds }}
  minReplicaCount: {{ .pool.autoscaling.minReplicas }}
  maxReplicaCount: {{ .pool.autoscaling.maxReplicas }}
  triggers:
    {{- $keda := .root.Values.keda }}
    {{- range include "twinfang.measures" . | fromYamlArray }}
    - type: prometheus
      name: {{ .metric }}
      metricType: Value
      metadata:
        serverAddress: {{ $keda.prometheusAddress | quote }}
        query: {{ .query | quote }}
        threshold: {{ .target | quote }}
    {{- end }}
  {{- with .pool.autoscaling.behavior }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- toYaml . | nindent 8 }}
  {{- end }}
{{- end -}}
