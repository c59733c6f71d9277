{{/* The router. */}}

{{- define "twinfang.routerSelector" -}}
{{ include "twinfang.selector" . }}
app.kubernetes.io/component: router
{{- end -}}

{{/* The pod of helm test, which is a client. */}}
{{- define "twinfang.testSelector" -}}
{{ include "twinfang.selector" . }}
app.kubernetes.io/component: test
{{- end -}}

{{/* The longest time of a request, in whole seconds; 600 without the flag, like the router's default. */}}
{{- define "twinfang.requestTimeout" -}}
{{- get (.Values.router.flags | default dict) "request-timeout" | default 600 | float64 | ceil | int -}}
{{- end -}}

{{- define "twinfang.shutdownGrace" -}}
{{- .Values.router.shutdownGraceSeconds | default (include "twinfang.requestTimeout" .) -}}
{{- end -}}

{{/* The seconds within which the servers of the slowest pool must be ready. */}}
{{- define "twinfang.slowestStart" -}}
{{- $slowest := .Values.poolDefaults.startTimeoutSeconds -}}
{{- range $pools := list .Values.prefillPools .Values.decodePools -}}
{{- range $pool := $pools -}}
{{- $slowest = max $slowest (($pool | default dict).startTimeoutSeconds | default 0) -}}
{{- end -}}
{{- end -}}
{{- $slowest -}}
{{- end -}}

{{/* The seconds that fetching the slowest model may take. */}}
{{- define "twinfang.slowestDownload" -}}
{{- $slowest := 0 -}}
{{- range .served -}}
{{- $slowest = max $slowest (include "twinfang.downloadSeconds" . | int) -}}
{{- end -}}
{{- $slowest -}}
{{- end -}}

{{/*
The number of routers. With autoscaling it is what runs, so that an upgrade changes nothing; where that can't be looked up, or at
the first install, it is left out, and the autoscaler sets it.
*/}}
{{- define "twinfang.routerReplicas" -}}
{{- if not .Values.router.autoscaling.enabled -}}
{{- .Values.router.replicas -}}
{{- else -}}
{{- $running := lookup "apps/v1" "Deployment" .Release.Namespace (printf "%s-router" (include "twinfang.fullname" .)) -}}
{{- with $running -}}{{- .spec.replicas | int -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Scales on CPU, since a router is one event loop: it is full when its core is. Kubernetes' own metrics suffice.
*/}}
{{- define "twinfang.routerAutoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "twinfang.fullname" . }}-router
  namespace: {{ .Release.Namespace }}
  labels: {{- include "twinfang.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "twinfang.fullname" . }}-router
  {{- with .Values.router.autoscaling }}
  minReplicas: {{ .minReplicas }}
  maxReplicas: {{ .maxReplicas }}
  metrics:
    - type: ContainerResource
      containerResource:
        name: cpu
        container: router
        target:
          type: Utilization
          averageUtilization: {{ .cpuPercent }}
  {{- with .behavior }}
  behavior: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* HTTP or HTTPS, as probes write it. */}}
{{- define "twinfang.routerScheme" -}}
{{- ternary "HTTPS" "HTTP" (not (empty (include "twinfang.routerTls" . | fromYaml).secretName)) -}}
{{- end -}}

{{/* For pods that check routers' certificates: the authority's certificate from the routers' secret, without their key. */}}
{{- define "twinfang.routerCaMount" -}}
{{- if and (include "twinfang.routerTls" . | fromYaml).secretName (include "twinfang.routerTls" . | fromYaml).caKey -}}
- name: router-ca
  mountPath: /etc/twinfang/router-ca
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "twinfang.routerCaVolume" -}}
{{- if and (include "twinfang.routerTls" . | fromYaml).secretName (include "twinfang.routerTls" . | fromYaml).caKey -}}
- name: router-ca
  secret:
    secretName: {{ (include "twinfang.routerTls" . | fromYaml).secretName }}
    defaultMode: 0440
    items:
      - key: {{ (include "twinfang.routerTls" . | fromYaml).caKey | quote }}
        path: ca.crt
{{- end -}}
{{- end -}}

{{- define "twinfang.routerChecks" -}}
{{- if and .Values.autoscale.enabled (include "twinfang.routerTls" . | fromYaml).secretName (not (include "twinfang.routerTls" . | fromYaml).serverName) -}}
{{- fail "autoscale.enabled with router.tls: the autoscaler checks routers' certificates; set router.tls.serverName to the name in them" -}}
{{- end -}}
{{- with .Values.router.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "router.autoscaling: minReplicas %v is above maxReplicas %v" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if and .enabled (not (($.Values.router.resources | default dict).requests | default dict).cpu) -}}
{{- fail "router.autoscaling: it scales on the share of the CPU request in use: set router.resources.requests.cpu" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "twinfang.routerArguments" -}}
- router
- {{ printf "--host=%s" (include "twinfang.anyHost" .) | quote }}
- --port=8000
{{- $models := include "twinfang.routerModels" . | fromYamlArray }}
{{- range $model := $models }}
{{- if gt (len $models) 1 }}
- {{ printf "--model=%s=%s" .name .directory | quote }}
{{- else }}
{{- with .directory }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
- {{ printf "--served-model-name=%s" .name | quote }}
{{- end }}
{{- end }}
- --kubernetes-namespace={{ .Release.Namespace }}
- --kubernetes-selector=app.kubernetes.io/instance={{ .Release.Name }},twinfang.io/role
- --shutdown-grace={{ include "twinfang.shutdownGrace" . }}
{{- if (include "twinfang.routerTls" . | fromYaml).secretName }}
- --ssl-certfile=/etc/twinfang/tls/tls.crt
- --ssl-keyfile=/etc/twinfang/tls/tls.key
{{- end }}
{{- include "twinfang.tlsArguments" (dict "root" . "role" "router") }}
{{- if or .Values.auth.apiKeys.existingSecret .Values.auth.apiKeys.lines }}
- {{ printf "--api-keys-file=/etc/twinfang/api-keys/%s" .Values.auth.apiKeys.key | quote }}
{{- end }}
{{- with .Values.auth.limitStore.url }}
- {{ printf "--limit-store=%s" . | quote }}
{{- end }}
{{- if or .Values.auth.adminToken.existingSecret .Values.auth.adminToken.digest }}
- {{ printf "--admin-token-file=/etc/twinfang/admin-token/%s" .Values.auth.adminToken.key | quote }}
{{- end }}
{{- with .Values.tracing.otlpEndpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
{{- include "twinfang.flags" .Values.router.flags }}
{{- end -}}

{{/* The router's account: that of the values, or the chart's own. */}}
{{- define "twinfang.routerAccount" -}}
{{- (.Values.router.serviceAccount | default dict).name | default (printf "%s-router" (include "twinfang.fullname" .)) -}}
{{- end -}}

{{- define "twinfang.routerLabels" -}}
{{ include "twinfang.podLabels" . }}
app.kubernetes.io/component: router
{{- end -}}

{{- define "twinfang.routerAnnotations" -}}
{{- with .Values.auth.adminToken.digest }}
# Routers read the admin token only at their start, but API keys again whenever they change.
checksum/admin-token: {{ sha256sum . }}
{{- end }}
{{- end -}}

{{- define "twinfang.routerPod" -}}
{{- $keys := or .Values.auth.apiKeys.existingSecret .Values.auth.apiKeys.lines -}}
{{- $admin := or .Values.auth.adminToken.existingSecret .Values.auth.adminToken.digest -}}
serviceAccountName: {{ include "twinfang.routerAccount" . }}
automountServiceAccountToken: true
# Without this, a Service named twinfang would set TWINFANG_PORT, which the router reads as --port.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .Values.router.preStopSeconds (include "twinfang.shutdownGrace" .) 15 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- include "twinfang.placement" (dict "values" .Values.router "selector" (include "twinfang.routerSelector" .)) }}
{{- with include "twinfang.routerFetches" . | trim }}
initContainers: {{- . | nindent 2 }}
{{- end }}
containers:
  - name: router
    image: {{ include "twinfang.image" (dict "image" .Values.routerImage "root" .) | quote }}
    imagePullPolicy: {{ .Values.routerImage.pullPolicy }}
    args: {{- include "twinfang.routerArguments" . | nindent 6 }}
    env:
      - name: HOME
        value: /tmp
      {{- with .Values.auth.limitStore.existingSecret }}
      - name: TWINFANG_LIMIT_STORE
        valueFrom:
          secretKeyRef:
            name: {{ . | quote }}
            key: {{ $.Values.auth.limitStore.key | quote }}
      {{- end }}
      {{- with include "twinfang.env" .Values.router.env | trim }}
      {{- . | nindent 6 }}
      {{- end }}
    ports:
      - name: http
        containerPort: 8000
    startupProbe:
      httpGet:
        path: /healthz
        port: http
        scheme: {{ include "twinfang.routerScheme" . }}
      periodSeconds: 2
      failureThreshold: 60
    readinessProbe:
      httpGet:
        path: /readyz
        port: http
        scheme: {{ include "twinfang.routerScheme" . }}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    livenessProbe:
      httpGet:
        path: /healthz
        port: http
        scheme: {{ include "twinfang.routerScheme" . }}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    # The line in which a router says why it ended, for kubectl describe.
    terminationMessagePolicy: FallbackToLogsOnError
    lifecycle:
      # The router still serves while its clients and load balancers learn that it will end.
      preStop:
        exec:
          command: [sleep, {{ .Values.router.preStopSeconds | quote }}]
    resources: {{- toYaml .Values.router.resources | nindent 6 }}
    securityContext: {{- include "twinfang.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      {{- with include "twinfang.routerModelMounts" . | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- if (include "twinfang.routerTls" . | fromYaml).secretName }}
      - name: tls
        mountPath: /etc/twinfang/tls
        readOnly: true
      {{- end }}
      {{- with include "twinfang.tlsMounts" (dict "root" . "roles" (list "router")) | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- if $keys }}
      - name: api-keys
        mountPath: /etc/twinfang/api-keys
        readOnly: true
      {{- end }}
      {{- if $admin }}
      - name: admin-token
        mountPath: /etc/twinfang/admin-token
        readOnly: true
      {{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  {{- with include "twinfang.routerModelVolumes" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with (include "twinfang.routerTls" . | fromYaml).secretName }}
  - name: tls
    secret:
      secretName: {{ . }}
      defaultMode: 0440
  {{- end }}
  {{- with include "twinfang.tlsVolumes" (dict "root" . "roles" (list "router")) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if $keys }}
  - name: api-keys
    secret:
      secretName: {{ .Values.auth.apiKeys.existingSecret | default (printf "%s-api-keys" (include "twinfang.fullname" .)) }}
      defaultMode: 0440
  {{- end }}
  {{- if $admin }}
  - name: admin-token
    secret:
      secretName: {{ .Values.auth.adminToken.existingSecret | default (printf "%s-admin-token" (include "twinfang.fullname" .)) }}
      defaultMode: 0440
  {{- end }}
{{- end -}}
