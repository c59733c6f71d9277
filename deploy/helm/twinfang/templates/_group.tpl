{{/*
Pools whose servers span several pods or share one. All templates take a pool's dictionary: root, role, name and pool. For
pods of a LeaderWorkerSet that have only ranks and no server ports, it also has part: worker.

  size  data-parallel ranks  in a pod                                   is a
  1     1                    one server                                 Deployment
  1     D                    D servers                                  Deployment
  n     1                    its part of one server's tensor-parallel   LeaderWorkerSet; only leaders have ports
  n     D                    D / n servers                              LeaderWorkerSet; all pods are alike
*/}}

{{- define "twinfang.groupSize" -}}
{{- (.pool.leaderWorkerSet | default dict).size | default 1 | int -}}
{{- end -}}

{{- define "twinfang.dataParallel" -}}
{{- .pool.dataParallel | default 1 | int -}}
{{- end -}}

{{/* "true" or empty. */}}
{{- define "twinfang.isGroup" -}}
{{- if gt (include "twinfang.groupSize" . | int) 1 -}}true{{- end -}}
{{- end -}}

{{/* Whether the ranks of one server are in several pods. */}}
{{- define "twinfang.spansPods" -}}
{{- if and (include "twinfang.isGroup" .) (eq (include "twinfang.dataParallel" . | int) 1) -}}true{{- end -}}
{{- end -}}

{{- define "twinfang.serversPerPod" -}}
{{- max 1 (div (include "twinfang.dataParallel" . | int) (include "twinfang.groupSize" . | int)) -}}
{{- end -}}

{{/* One GPU for each rank. */}}
{{- define "twinfang.gpusPerPod" -}}
{{- div (mul (include "twinfang.dataParallel" . | int) (int .pool.tensorParallel)) (include "twinfang.groupSize" . | int) -}}
{{- end -}}

{{/* The most servers in one pod, over all pools of the role; 1 if the role is no server's. Takes a dictionary with root and role. */}}
{{- define "twinfang.mostServers" -}}
{{- $most := 1 -}}
{{- range $name, $own := index .root.Values (printf "%sPools" .role) -}}
{{- $pool := mustMergeOverwrite (deepCopy $.root.Values.poolDefaults) ($own | default dict) -}}
{{- $most = max $most (include "twinfang.serversPerPod" (dict "pool" $pool) | int) -}}
{{- end -}}
{{- $most -}}
{{- end -}}

{{/* 8200 or 8200-8203. Takes a dictionary with first and number. */}}
{{- define "twinfang.portRange" -}}
{{- .first -}}{{- if gt (int .number) 1 -}}-{{- sub (add (int .first) (int .number)) 1 -}}{{- end -}}
{{- end -}}

{{/* The gRPC ports of a pod. */}}
{{- define "twinfang.serverPorts" -}}
{{- include "twinfang.portRange" (dict "first" (include "twinfang.serverPort" .role) "number" (include "twinfang.serversPerPod" .)) -}}
{{- end -}}

{{/* The ports at which others reach rank 0 and host 0, and at which a pod of several servers is probed. */}}
{{- define "twinfang.meetingPort" -}}8290{{- end -}}
{{- define "twinfang.probePort" -}}18290{{- end -}}

{{- define "twinfang.component" -}}
{{- .role -}}{{- with .part -}}-{{- . -}}{{- end -}}
{{- end -}}

{{/* The name of a pod's i-th server's port, from 0. Takes a dictionary with name and i. */}}
{{- define "twinfang.portName" -}}
{{- .name -}}{{- if gt (int .i) 0 -}}-{{- .i -}}{{- end -}}
{{- end -}}

{{/* The label that leaders and workers of a pool share. A Deployment's pods do not have it. */}}
{{- define "twinfang.groupLabel" -}}
twinfang.io/group: {{ printf "%s-%s" .role .name | quote }}
{{- end -}}

{{/*
The command that drains all servers that must be idle before a pod may end. If one pod of a group ends, the whole group ends,
so all servers of the group are drained. LeaderWorkerSet tells pods the leader's name, NAME-0.NAME.NAMESPACE; workers are
NAME-0-1.NAME.NAMESPACE and so on. The command runs in a shell, because hooks expand variables only there.
*/}}
{{- define "twinfang.drainCommand" -}}
{{- $timeout := printf "--timeout=%v" .pool.drainSeconds -}}
{{- $tls := include "twinfang.tlsArguments" (dict "root" .root "role" "operator") | fromYamlArray -}}
{{- $isItsOwn := and (include "twinfang.spansPods" .) (not .part) -}}
{{- if or $isItsOwn (not (include "twinfang.isGroup" .)) -}}
{{- $host := ternary "[::1]" "127.0.0.1" (eq .root.Values.ipFamily "IPv6") -}}
{{- toYaml (concat (list "twinfang" "drain" (printf "--server=%s:%s" $host (include "twinfang.serverPorts" .)) $timeout) $tls) -}}
{{- else -}}
{{- $ports := include "twinfang.serverPorts" . -}}
{{- $servers := list (printf "--server=$LWS_LEADER_ADDRESS:%s" $ports) -}}
{{- if not (include "twinfang.spansPods" .) -}}
{{- range $i := untilStep 1 (include "twinfang.groupSize" . | int) 1 -}}
{{- $servers = append $servers (printf "--server=${LWS_LEADER_ADDRESS%%%%.*}-%d.${LWS_LEADER_ADDRESS#*.}:%s" $i $ports) -}}
{{- end -}}
{{- end -}}
{{- toYaml (list "sh" "-c" (printf "exec twinfang drain %s" (join " " (concat $servers (list $timeout) $tls)))) -}}
{{- end -}}
{{- end -}}

{{- define "twinfang.serverSet" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ include "twinfang.poolName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "twinfang.workloadLabels" . | nindent 4 }}
  {{- with .pool.leaderWorkerSet.exclusiveTopology }}
  annotations:
    leaderworkerset.sigs.k8s.io/exclusive-topology: {{ . | quote }}
  {{- end }}
spec:
  {{- with include "twinfang.replicas" . }}
  {{ . }}
  {{- end }}
  # A leader becomes ready only with its workers.
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {{- toYaml .pool.strategy.rollingUpdate | nindent 6 }}
  leaderWorkerTemplate:
    size: {{ include "twinfang.groupSize" . }}
    # Ranks can only compute together: if one pod fails, the whole group restarts.
    restartPolicy: RecreateGroupOnPodRestart
    {{- if include "twinfang.spansPods" . }}
    leaderTemplate: {{- include "twinfang.serverTemplate" . | nindent 6 }}
    workerTemplate: {{- include "twinfang.serverTemplate" (merge (dict "part" "worker") .) | nindent 6 }}
    {{- else }}
    workerTemplate: {{- include "twinfang.serverTemplate" . | nindent 6 }}
    {{- end }}
{{- end -}}

{{/* Ranks of a group reach one another on ports that they choose themselves: gloo's, NCCL's and those of Twinfang's mesh. */}}
{{- define "twinfang.groupPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "twinfang.poolName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "twinfang.labels" .root | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "twinfang.groupSelector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        - podSelector:
            matchLabels: {{- include "twinfang.groupSelector" . | nindent 14 }}
  egress:
    - to:
        - podSelector:
            matchLabels: {{- include "twinfang.groupSelector" . | nindent 14 }}
{{- end -}}

{{- define "twinfang.groupSelector" -}}
{{ include "twinfang.selector" .root }}
{{ include "twinfang.groupLabel" . }}
{{- end -}}

{{/* The object that a scaler scales. */}}
{{- define "twinfang.scaleTarget" -}}
{{- $isGroup := include "twinfang.isGroup" . -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $isGroup "true") }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" (eq $isGroup "true") }}
name: {{ include "twinfang.poolName" . }}
{{- end -}}

{{/* Refuses values with which a pool can't form a group. */}}
{{- define "twinfang.groupChecks" -}}
{{- $where := printf "%sPools.%s" .role .name -}}
{{- $size := include "twinfang.groupSize" . | int -}}
{{- $ranks := include "twinfang.dataParallel" . | int -}}
{{- $own := int .pool.tensorParallel -}}
{{- $shares := .pool.expertParallel | default false -}}
{{- if and (gt $size 1) (eq $ranks 1) (ne (mod $own $size) 0) -}}
{{- fail (printf "%s.tensorParallel %d can't be divided among the %d pods of leaderWorkerSet.size: choose a multiple of %d, or size 1 for servers of one pod" $where $own $size $size) -}}
{{- end -}}
{{- if and (gt $ranks 1) (ne (mod $ranks $size) 0) -}}
{{- fail (printf "%s.dataParallel %d can't be divided among the %d pods of leaderWorkerSet.size: choose a multiple of %d; a data-parallel rank's tensorParallel processes are in one pod" $where $ranks $size $size) -}}
{{- end -}}
{{- if and (gt $size 1) (gt $ranks 1) (not $shares) -}}
{{- fail (printf "%s.leaderWorkerSet.size %d: dataParallel ranks without expertParallel share nothing that would keep their pods together; set expertParallel: true, or size 1 and more replicas" $where $size) -}}
{{- end -}}
{{- if and $shares (eq (mul $ranks $own) 1) -}}
{{- fail (printf "%s.expertParallel: there is one rank, which has all experts; set dataParallel or tensorParallel above 1" $where) -}}
{{- end -}}
{{- if gt (include "twinfang.serversPerPod" . | int) 64 -}}
{{- fail (printf "%s.dataParallel %d: a pod has 64 servers at most, not %s; set leaderWorkerSet.size to spread them over pods" $where $ranks (include "twinfang.serversPerPod" .)) -}}
{{- end -}}
{{- if gt $size 1 -}}
{{- if ne .pool.strategy.type "RollingUpdate" -}}
{{- fail (printf "%s.strategy.type %s: a LeaderWorkerSet knows RollingUpdate alone; its rollingUpdate {maxSurge: 0, maxUnavailable: 1} lets a group go before its successor comes" $where .pool.strategy.type) -}}
{{- end -}}
{{- $name := include "twinfang.poolName" . -}}
{{- if gt (len $name) 48 -}}
{{- fail (printf "%s: the LeaderWorkerSet %s has a name of %d characters, and with the numbers of its pods there is room for 48; set a shorter fullnameOverride, or name the pool shorter" $where $name (len $name)) -}}
{{- end -}}
{{- end -}}
{{- if and .root.Values.autoscale.enabled .root.Values.autoscale.apply (or (gt $size 1) (gt $ranks 1)) -}}
{{- fail (printf "autoscale.apply: it scales Deployments whose pods are one server each, and %s has leaderWorkerSet.size %d and dataParallel %d; use %s.autoscaling, or leave autoscale.apply off" $where $size $ranks $where) -}}
{{- end -}}
{{- end -}}
