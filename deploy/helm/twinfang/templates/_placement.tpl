{{/* Where pods may run, and what of their node they share. */}}

{{/*
Takes a dictionary with values (a pool's or the router's) and selector (of its pods); for a pool also near, by which
affinity to other pods is added to that of the values: see twinfang.nearServers.
*/}}
{{- define "twinfang.placement" -}}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy (.values.affinity | default dict) }}
{{- range $kind, $rules := .near }}
{{- $own := get $affinity $kind | default dict }}
{{- range $when, $terms := $rules }}
{{- $_ := set $own $when (concat (get $own $when | default list) $terms) }}
{{- end }}
{{- $_ := set $affinity $kind $own }}
{{- end }}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (mergeOverwrite (dict "labelSelector" (dict "matchLabels" ($.selector | fromYaml))) .) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- if .values.hostNetwork }}
hostNetwork: true
# Names of the cluster's Services, which a node's own name servers do not know.
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end -}}

{{/*
Affinity of a pool's pods to servers of their model in the other role, as a dictionary of lists in YAML. With topologyKey
the scheduler prefers nodes near them. Pods that share their host have a node each, because they use fixed GPUs of it; decode
servers among them go only where a prefill server runs. Takes a pool's dictionary.
*/}}
{{- define "twinfang.nearServers" -}}
{{- $other := include "twinfang.selector" .root | fromYaml -}}
{{- $_ := set $other "app.kubernetes.io/component" (ternary "decode" "prefill" (eq .role "prefill")) -}}
{{- $_ := set $other "twinfang.io/model" (include "twinfang.modelLabel" .root) -}}
{{- $shares := include "twinfang.sharedGpus" . -}}
{{- if or .pool.topologyKey (and $shares (eq .role "decode")) }}
podAffinity:
  {{- with .pool.topologyKey }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: {{ . | quote }}
        labelSelector:
          matchLabels: {{- toYaml $other | nindent 12 }}
  {{- end }}
  {{- if and $shares (eq .role "decode") }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels: {{- toYaml $other | nindent 10 }}
  {{- end }}
{{- end }}
{{- if $shares }}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels: {{- include "twinfang.poolSelector" . | nindent 10 }}
{{- end }}
{{- end -}}

{{/* GPUs that a pool's pods use of their node, if they share it: "0,1". Takes a pool's dictionary. */}}
{{- define "twinfang.sharedGpus" -}}
{{- range $i, $gpu := (.pool.sharedHost | default dict).gpus -}}
{{- if $i -}},{{- end -}}{{- int $gpu -}}
{{- end -}}
{{- end -}}

{{/*
What lets servers of one node read one another's GPU memory (cuda_ipc), beside the node's processes and IPC: each sees
the GPUs of all. A server uses the first ones, so its own are listed first. Takes a pool's dictionary.
*/}}
{{- define "twinfang.sharedHostEnvironment" -}}
{{- with include "twinfang.sharedGpus" . }}
{{- $gpus := list . }}
{{- range $role := list "prefill" "decode" }}
{{- range $name, $pool := get $.root.Values (printf "%sPools" $role) }}
{{- if ne (printf "%s %s" $role $name) (printf "%s %s" $.role $.name) }}
{{- with include "twinfang.sharedGpus" (dict "pool" ($pool | default dict)) }}
{{- $gpus = append $gpus . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
# GPUs are numbered as nvidia-smi numbers them.
- name: CUDA_DEVICE_ORDER
  value: PCI_BUS_ID
- name: CUDA_VISIBLE_DEVICES
  value: {{ join "," $gpus | quote }}
{{- end }}
{{- end -}}

{{/* Refuses pools that can't share their nodes. Takes a pool's dictionary. */}}
{{- define "twinfang.sharedHostChecks" -}}
{{- with include "twinfang.sharedGpus" . -}}
{{- $where := printf "%sPools.%s.sharedHost.gpus" $.role $.name -}}
{{- $gpus := splitList "," . -}}
{{- if ne $.pool.device "cuda" -}}
{{- fail (printf "%s: device %s has no GPUs to share; leave sharedHost out" $where $.pool.device) -}}
{{- end -}}
{{- if ne (len $gpus) (include "twinfang.gpusPerPod" $ | int) -}}
{{- fail (printf "%s names %d GPUs, and a pod has %s ranks: name one GPU for each" $where (len $gpus) (include "twinfang.gpusPerPod" $)) -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- range $name, $pool := get $.root.Values (printf "%sPools" $role) -}}
{{- if ne (printf "%s %s" $role $name) (printf "%s %s" $.role $.name) -}}
{{- range splitList "," (include "twinfang.sharedGpus" (dict "pool" ($pool | default dict))) -}}
{{- if has . $gpus -}}
{{- fail (printf "%s: %sPools.%s uses GPU %s too; give each pool its own" $where $role $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
