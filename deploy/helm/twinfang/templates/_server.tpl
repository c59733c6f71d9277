{{/*
A pool of prefill or decode servers. All take a dictionary with root, role, name and pool; see _group.tpl for pods that have
several servers, or a part of one.
*/}}

{{/* The gRPC port of a pod's first server, by role. Metrics ports are 10,000 higher, as the servers' default is. */}}
{{- define "twinfang.serverPort" -}}
{{- ternary 8100 8200 (eq . "prefill") -}}
{{- end -}}

{{- define "twinfang.serverMetricsPort" -}}
{{- ternary 18100 18200 (eq . "prefill") -}}
{{- end -}}

{{- define "twinfang.poolName" -}}
{{ include "twinfang.fullname" .root }}-{{ .role }}-{{ .name }}
{{- end -}}

{{- define "twinfang.poolSelector" -}}
{{ include "twinfang.selector" .root }}
app.kubernetes.io/component: {{ include "twinfang.component" . }}
twinfang.io/pool: {{ .name | quote }}
{{- end -}}

{{/* Labels of the pool's pods: routers find servers by role, model and port. */}}
{{- define "twinfang.serverLabels" -}}
{{ include "twinfang.podLabels" .root }}
app.kubernetes.io/component: {{ include "twinfang.component" . }}
twinfang.io/pool: {{ .name | quote }}
{{- if not .part }}
twinfang.io/role: {{ .role }}
twinfang.io/model: {{ include "twinfang.modelLabel" .root | quote }}
twinfang.io/port: {{ include "twinfang.serverPorts" . | quote }}
{{- end }}
{{- if include "twinfang.isGroup" . }}
{{ include "twinfang.groupLabel" . }}
{{- end }}
{{- end -}}

{{- define "twinfang.serverArguments" -}}
{{- $values := .root.Values -}}
- {{ .role }}
- {{ printf "--host=%s" (include "twinfang.anyHost" .root) | quote }}
- --port={{ include "twinfang.serverPort" .role }}
- --advertise-host=$(POD_IP)
- --metrics-port={{ include "twinfang.serverMetricsPort" .role }}
{{- with include "twinfang.modelPath" .root }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
- {{ printf "--served-model-name=%s" (include "twinfang.model" .root) | quote }}
- --device={{ .pool.device }}
- --tensor-parallel={{ .pool.tensorParallel }}
- --hang-deadline={{ .pool.hangSeconds }}
{{- if include "twinfang.spansPods" . }}
- --nnodes={{ include "twinfang.groupSize" . }}
{{- end }}
{{- if gt (include "twinfang.dataParallel" . | int) 1 }}
- --data-parallel-size={{ include "twinfang.dataParallel" . }}
{{- end }}
{{- if .pool.expertParallel }}
- --enable-expert-parallel
{{- end }}
{{- if gt (include "twinfang.serversPerPod" . | int) 1 }}
- --probe-port={{ include "twinfang.probePort" . }}
{{- end }}
{{- with $values.speculative }}
{{- if .tokens }}
- --speculative={{ .tokens }}
{{- with .drafter }}
- --drafter={{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- include "twinfang.tlsArguments" (dict "root" .root "role" "server") }}
{{- with $values.tracing.otlpEndpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
{{- include "twinfang.flags" .pool.flags }}
{{- if eq .role "decode" }}
{{- $flags := .pool.flags | default dict }}
{{- if not (or (hasKey $flags "local-prefill") (eq (get $flags "role") "both")) }}
# Prefill and decode pools roll out separately, so an old decode server may find only new prefill servers, and the other way round.
- --local-prefill
{{- end }}
{{- end }}
{{- end -}}

{{- define "twinfang.serverEnvironment" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /tmp
# Compiled kernels outlive a restart of the container, and the pod if the pool's cacheVolume does.
- name: NUMBA_CACHE_DIR
  value: /cache/numba
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: UCX_TCP_PORT_RANGE
  value: {{ .root.Values.nixl.portRange | quote }}
{{- with .root.Values.nixl.transports }}
- name: UCX_TLS
  value: {{ . | quote }}
{{- end }}
{{- with .root.Values.nixl.netDevices }}
- name: UCX_NET_DEVICES
  value: {{ . | quote }}
{{- end }}
{{- include "twinfang.sharedHostEnvironment" . }}
{{- include "twinfang.env" .pool.env }}
{{- end -}}

{{/*
The pool's own resources, plus those that the chart adds for every server, and all of the pod's claims. Quantities are
texts: server-side apply compares types, and has refused numbers.
*/}}
{{- define "twinfang.serverResources" -}}
{{- $resources := .pool.resources | default dict | deepCopy -}}
{{- $limits := $resources.limits | default dict -}}
{{- if and .pool.gpuResource (eq .pool.device "cuda") -}}
{{- $_ := set $limits .pool.gpuResource (include "twinfang.gpusPerPod" .) -}}
{{- end -}}
{{- with .root.Values.nixl -}}
{{- if .rdmaResource -}}
{{- $_ := set $limits .rdmaResource (toString .rdmaCount) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- $claims := list -}}
{{- range .pool.resourceClaims -}}
{{- $claims = append $claims (dict "name" .name) -}}
{{- end -}}
{{- with $claims -}}
{{- $_ := set $resources "claims" . -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "twinfang.serverSecurity" -}}
{{- if .root.Values.nixl.ipcLock -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: false
runAsUser: 0
capabilities:
  drop: [ALL]
  add: [IPC_LOCK]
{{- else -}}
{{- include "twinfang.containerSecurity" . -}}
{{- end -}}
{{- end -}}

{{/*
gRPC's health service says NOT_SERVING while a server drains and stops. That must not restart the server, so liveness
probes use the HTTP port, where a separate thread answers from the start. A kubelet looks at only one port: if a pod has
several servers, their parent process reports whether all are ready and whether one hangs, and restarts those that end. A
part of a server has no probe: it ends when its server ends.

A server that hangs can't be drained. So when its liveness probe has failed, the drain hook and what follows SIGTERM get only
a few seconds together.
*/}}
{{- define "twinfang.serverProbes" -}}
{{- $alone := eq (include "twinfang.serversPerPod" . | int) 1 -}}
startupProbe: {{- include "twinfang.serverReadiness" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .pool.startTimeoutSeconds 4) 5 }}
readinessProbe: {{- include "twinfang.serverReadiness" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet:
    path: /healthz
    port: {{ ternary "metrics" "probes" $alone }}
    {{- if .root.Values.tls.enabled }}
    scheme: HTTPS
    {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
  terminationGracePeriodSeconds: 10
{{- end -}}

{{- define "twinfang.serverReadiness" -}}
{{- if and (eq (include "twinfang.serversPerPod" . | int) 1) .root.Values.tls.enabled -}}
{{- /* A kubelet's gRPC probes have no TLS. */ -}}
httpGet:
  path: /readyz
  port: metrics
  scheme: HTTPS
{{- else if eq (include "twinfang.serversPerPod" . | int) 1 -}}
grpc:
  port: {{ include "twinfang.serverPort" .role }}
{{- else -}}
httpGet:
  path: /readyz
  port: probes
  {{- if .root.Values.tls.enabled }}
  scheme: HTTPS
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "twinfang.containerPorts" -}}
- name: grpc
  containerPort: {{ include "twinfang.serverPort" .role }}
- name: metrics
  containerPort: {{ include "twinfang.serverMetricsPort" .role }}
{{- range $i := untilStep 1 (include "twinfang.serversPerPod" . | int) 1 }}
- name: grpc-{{ $i }}
  containerPort: {{ add (include "twinfang.serverPort" $.role | int) $i }}
- name: metrics-{{ $i }}
  containerPort: {{ add (include "twinfang.serverMetricsPort" $.role | int) $i }}
{{- end }}
{{- if gt (include "twinfang.serversPerPod" . | int) 1 }}
- name: probes
  containerPort: {{ include "twinfang.probePort" . }}
{{- end }}
{{- if include "twinfang.isGroup" . }}
- name: meeting
  containerPort: {{ include "twinfang.meetingPort" . }}
{{- end }}
{{- end -}}

{{- define "twinfang.serverPod" -}}
serviceAccountName: {{ (.pool.serviceAccount | default dict).name | default (printf "%s-server" (include "twinfang.fullname" .root)) }}
automountServiceAccountToken: false
# A Service called twinfang would set TWINFANG_PORT, which is a flag.
enableServiceLinks: false
# The drain, what SIGTERM adds to it, and an end without haste.
terminationGracePeriodSeconds: {{ add .pool.drainSeconds 30 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- include "twinfang.placement" (dict "values" .pool "selector" (include "twinfang.poolSelector" .) "near" (include "twinfang.nearServers" . | fromYaml)) }}
{{- if or .pool.hostIPC (include "twinfang.sharedGpus" .) }}
hostIPC: true
{{- end }}
{{- if include "twinfang.sharedGpus" . }}
hostPID: true
{{- end }}
{{- with .pool.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.model.download.source }}
initContainers:
  {{- include "twinfang.fetchContainer" (dict "root" .root "image" .root.Values.image "volume" "model" "mount" "/models" "directory" (include "twinfang.modelPath" .root) "weights" true) | nindent 2 }}
{{- end }}
containers:
  - name: server
    image: {{ include "twinfang.image" (dict "image" .root.Values.image "root" .root) | quote }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args: {{- include "twinfang.serverArguments" . | nindent 6 }}
    env: {{- include "twinfang.serverEnvironment" . | nindent 6 }}
    {{- if not .part }}
    ports: {{- include "twinfang.containerPorts" . | nindent 6 }}
    {{- include "twinfang.serverProbes" . | nindent 4 }}
    {{- end }}
    # The line in which a server says why it ended, for kubectl describe.
    terminationMessagePolicy: FallbackToLogsOnError
    # Routers that see the pod being deleted have its requests move; this waits until nothing is left, or its time
    # is over. Then comes SIGTERM.
    lifecycle:
      preStop:
        exec:
          command: {{- include "twinfang.drainCommand" . | nindent 12 }}
    resources: {{- include "twinfang.serverResources" . | nindent 6 }}
    securityContext: {{- include "twinfang.serverSecurity" . | nindent 6 }}
    volumeMounts:
      - name: shared-memory
        mountPath: /dev/shm
      - name: tmp
        mountPath: /tmp
      - name: cache
        mountPath: /cache
      {{- if .root.Values.model.volume }}
      {{- include "twinfang.modelMount" (dict "name" "model" "path" "/models") | nindent 6 }}
      {{- end }}
      {{- with include "twinfang.tlsMounts" (dict "root" .root "roles" (list "server" "operator")) | trim }}
      {{- . | nindent 6 }}
      {{- end }}
volumes:
  - name: shared-memory
    emptyDir:
      medium: Memory
      sizeLimit: {{ .pool.sharedMemory }}
  - name: tmp
    emptyDir: {}
  - name: cache
    {{- toYaml (.pool.cacheVolume | default (dict "emptyDir" dict)) | nindent 4 }}
  {{- with include "twinfang.tlsVolumes" (dict "root" .root "roles" (list "server" "operator")) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .root.Values.model.volume }}
  {{- include "twinfang.modelVolume" (dict "name" "model" "volume" . "fetches" $.root.Values.model.download.source) | nindent 2 }}
  {{- end }}
  {{- with include "twinfang.fetchToken" (dict "root" .root "volume" "model") }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The pod template of Deployments and LeaderWorkerSets. */}}
{{- define "twinfang.serverTemplate" -}}
{{- include "twinfang.podTemplate" (dict "values" .pool "where" (printf "%sPools.%s" .role .name) "labels" (include "twinfang.serverLabels" .) "annotations" "" "spec" (include "twinfang.serverPod" .)) -}}
{{- end -}}

{{/* Labels of the object that makes a pool's pods. */}}
{{- define "twinfang.workloadLabels" -}}
{{- $own := printf "%s\napp.kubernetes.io/component: %s\ntwinfang.io/pool: %q" (include "twinfang.labels" .root) .role .name -}}
{{- include "twinfang.joined" (dict "own" $own "more" .pool.workloadLabels "where" (printf "%sPools.%s.workloadLabels" .role .name)) -}}
{{- end -}}

{{- define "twinfang.serverDeployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "twinfang.poolName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "twinfang.workloadLabels" . | nindent 4 }}
spec:
  {{- with include "twinfang.replicas" . }}
  {{ . }}
  {{- end }}
  strategy: {{- include "twinfang.strategy" .pool.strategy | nindent 4 }}
  # Routers that can talk only to new servers take over in this time, before the last old server ends.
  minReadySeconds: 30
  # Loading a large model takes longer than the default of ten minutes.
  progressDeadlineSeconds: {{ add .pool.startTimeoutSeconds (include "twinfang.downloadSeconds" .root) 600 }}
  selector:
    matchLabels: {{- include "twinfang.poolSelector" . | nindent 6 }}
  template: {{- include "twinfang.serverTemplate" . | nindent 4 }}
{{- end -}}
