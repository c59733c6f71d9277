{{/*
The Prometheus metrics by which pools are scaled. All templates take a pool's dictionary.

The adapter's rules in deploy/observability/prometheus-adapter.yaml are the same queries, for each pod.
*/}}

{{/* The selector of the pool's series. The service's name contains release and role. */}}
{{- define "twinfang.poolSeries" -}}
namespace="{{ .root.Release.Namespace }}",service="{{ include "twinfang.fullname" .root }}-{{ .role }}",pool="{{ .name }}"
{{- end -}}

{{/* The selector of the series of this release's routers; of those of the pool's model, if the release has several. */}}
{{- define "twinfang.routerSeries" -}}
namespace="{{ .root.Release.Namespace }}",service="{{ include "twinfang.fullname" .root }}-router"
{{- if .root.isOneOfSeveral }},model={{ include "twinfang.model" .root | quote }}{{ end }}
{{- end -}}

{{/*
A histogram's mean over two minutes; 0 if there was nothing to observe. Nothing at all where the series are missing, so that
lost metrics never look like an idle pool. Takes a dictionary with series and histogram.
*/}}
{{- define "twinfang.meanQuery" -}}
sum(rate({{ .histogram }}_sum{ {{- .series -}} }[2m])) / (sum(rate({{ .histogram }}_count{ {{- .series -}} }[2m])) > 0) or 0 * sum({{ .histogram }}_count{ {{- .series -}} })
{{- end -}}

{{/*
The mean wait in routers of requests that were let in within two minutes. If none was let in, although one waited all that
time: those two minutes. 0 while 90 % of the decode servers' places are taken: then requests wait for decode servers, and
further prefill servers would not help. Takes the routers' series.
*/}}
{{- define "twinfang.routerWaitQuery" -}}
(sum(rate(twinfang_request_queue_seconds_sum{ {{- . -}} }[2m])) / (sum(rate(twinfang_request_queue_seconds_count{ {{- . -}} }[2m])) > 0) or 120 * (sum(min_over_time(twinfang_requests_queued{ {{- . -}} }[2m])) > bool 0)) * (sum(twinfang_places_taken{ {{- . -}} }) < bool 0.9 * sum(twinfang_places{ {{- . -}} }))
{{- end -}}

{{/*
A list of measures: metric is the custom metrics API's name, query gives the pool's value, target is the wanted value. A
measure with object is one of the routers' Service, and its model is the one that it is about, if there are several; the
others are means over the pool's pods.
*/}}
{{- define "twinfang.measures" -}}
{{- $series := include "twinfang.poolSeries" . -}}
{{- $scaling := .pool.autoscaling -}}
{{- if eq .role "prefill" }}
- metric: twinfang_router_wait_seconds
  object: {{ include "twinfang.fullname" .root }}-router
  {{- if .root.isOneOfSeveral }}
  model: {{ include "twinfang.model" .root | quote }}
  {{- end }}
  query: {{ include "twinfang.routerWaitQuery" (include "twinfang.routerSeries" .) | quote }}
  target: {{ include "twinfang.text" $scaling.queueSeconds | quote }}
- metric: twinfang_busy_percent
  query: {{ printf "100 * avg(sum by (pod) (rate(twinfang_step_seconds_sum{%s}[2m])))" $series | quote }}
  target: {{ $scaling.usedPercent | toString | quote }}
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

{{/*
The line "replicas: N" of a pool's manifest. A scaler sets the number of a pool that is scaled. Its manifest repeats the
number that runs now: an upgrade that leaves the line out would take the pool to one pod. Where Helm sees no cluster
(helm template) and at the first install, the line is left out.
*/}}
{{- define "twinfang.replicas" -}}
{{- if or .pool.autoscaling.enabled (and .root.Values.autoscale.enabled .root.Values.autoscale.apply) -}}
{{- $target := include "twinfang.scaleTarget" . | fromYaml -}}
{{- $running := lookup $target.apiVersion $target.kind .root.Release.Namespace $target.name -}}
{{- with $running -}}
replicas: {{ .spec.replicas | int }}
{{- end -}}
{{- else -}}
replicas: {{ .pool.replicas }}
{{- end -}}
{{- end -}}

{{- define "twinfang.horizontalPodAutoscaler" -}}
{{- if and .root.isOneOfSeveral (eq .role "prefill") (ne (include "twinfang.model" .root) (include "twinfang.modelLabel" .root)) -}}
{{- fail (printf "prefillPools.%s.autoscaling: a HorizontalPodAutoscaler finds the metrics of one of several models by its name, and %s is no value of a label: set kind keda, or a models[].name of at most 63 letters, digits, '-', '_' and '.'" .name (include "twinfang.model" .root)) -}}
{{- end -}}
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
    {{- if .object }}
    - type: Object
      object:
        describedObject:
          apiVersion: v1
          kind: Service
          name: {{ .object }}
        metric:
          name: {{ .metric }}
          {{- with .model }}
          selector:
            matchLabels:
              model: {{ . | quote }}
          {{- end }}
        target:
          type: Value
          value: {{ .target | quote }}
    {{- else }}
    - type: Pods
      pods:
        metric:
          name: {{ .metric }}
        target:
          type: AverageValue
          averageValue: {{ .target | quote }}
    {{- end }}
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
  # Without metrics the pool keeps its size, or gets its replicas if these are more.
  fallback:
    failureThreshold: 3
    replicas: {{ .pool.replicas | max .pool.autoscaling.minReplicas | min .pool.autoscaling.maxReplicas }}
    behavior: currentReplicasIfHigher
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
        # An empty answer is an error, not an idle pool.
        ignoreNullValues: "false"
    {{- end }}
  {{- with .pool.autoscaling.behavior }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- toYaml . | nindent 8 }}
  {{- end }}
{{- end -}}
