{{/* Refuses values that contradict one another, which the schema can't see. Each error names them and a remedy. */}}

{{- define "twinfang.checks" -}}
{{- $values := .Values -}}
{{- if and $values.model.directory (not $values.model.volume) -}}
{{- fail (printf "model.directory %q: there is no model.volume for it to be in; set one, or leave both empty for the small model of the image" $values.model.directory) -}}
{{- end -}}
{{- if and $values.model.volume (not $values.model.directory) -}}
{{- fail "model.volume is set, but not model.directory: name the model's directory in it, or \".\" for its root" -}}
{{- end -}}
{{- if and (eq (clean $values.model.directory) ".") $values.model.directory (not $values.model.name) -}}
{{- fail "model.directory \".\" is no name that clients could use: set model.name" -}}
{{- end -}}
{{- if and $values.model.volume.image (semverCompare "<1.31-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.volume.image needs Kubernetes 1.31, this is %s: use a persistentVolumeClaim or a hostPath" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if not $values.decodePools -}}
{{- fail "decodePools is empty: a router needs at least one decode server" -}}
{{- end -}}
{{- $needsNoPrefill := false -}}
{{- range $name, $pool := $values.decodePools -}}
{{- $flags := ($pool | default dict).flags | default dict -}}
{{- if or (eq (get $flags "role") "both") (eq (toString (get $flags "local-prefill")) "true") -}}
{{- $needsNoPrefill = true -}}
{{- end -}}
{{- end -}}
{{- if not (or $values.prefillPools $needsNoPrefill) -}}
{{- fail "prefillPools is empty, and no decode pool runs prompts itself: add a prefill pool, or set flags {role: both} on a decode pool" -}}
{{- end -}}
{{- if and $values.gateway.enabled (not $values.gateway.parentRefs) -}}
{{- fail "gateway.enabled is true, but gateway.parentRefs names no gateway" -}}
{{- end -}}
{{- if $values.autoscale.enabled -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pools := get $values (printf "%sPools" $role) -}}
{{- if ne (len $pools) 1 -}}
{{- fail (printf "autoscale.enabled: it plans one pool of each role, and %sPools has %d: %s" $role (len $pools) (keys $pools | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $values.autoscale.enabled -}}
{{- range $role := list "prefill" "decode" -}}
{{- $flags := $values.autoscale.flags | default dict -}}
{{- $least := get $flags (printf "min-%s" $role) | default 1 | int -}}
{{- $most := get $flags (printf "max-%s" $role) | default 8 | int -}}
{{- if gt $least $most -}}
{{- fail (printf "autoscale.flags: min-%s %d is above max-%s %d (8 where it is not given)" $role $least $role $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "twinfang.strategyChecks" (dict "where" "router" "strategy" $values.router.strategy) -}}
{{- $ports := splitList "-" $values.nixl.portRange -}}
{{- if or (gt (int (first $ports)) (int (last $ports))) (gt (int (last $ports)) 65535) -}}
{{- fail (printf "nixl.portRange %q: give the lower port first, and none above 65535" $values.nixl.portRange) -}}
{{- end -}}
{{- $admin := $values.auth.adminToken -}}
{{- if and (or $admin.existingSecret $admin.digest) (gt (int (get ($values.router.flags | default dict) "workers" | default 1)) 1) -}}
{{- fail (printf "router.flags.workers %v and auth.adminToken: the admin API works with only one process; raise router.replicas instead" (get $values.router.flags "workers")) -}}
{{- end -}}
{{- end -}}

{{/* Checks a strategy. Takes a dictionary with strategy and where it is set. */}}
{{- define "twinfang.strategyChecks" -}}
{{- with .strategy.rollingUpdate -}}
{{- if and (eq $.strategy.type "RollingUpdate") (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.strategy.rollingUpdate: maxSurge and maxUnavailable are both 0, so that no pod could ever be replaced; set one of them to 1" $.where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks one pool. Takes the pool's dictionary. */}}
{{- define "twinfang.poolChecks" -}}
{{- include "twinfang.strategyChecks" (dict "where" (printf "%sPools.%s" .role .name) "strategy" .pool.strategy) -}}
{{- include "twinfang.groupChecks" . -}}
{{- $taken := fromYamlArray (include "twinfang.serverEnvironment" (dict "root" .root "pool" (dict "env" dict))) -}}
{{- range $one := $taken -}}
{{- if hasKey ($.pool.env | default dict) $one.name -}}
{{- fail (printf "%sPools.%s.env.%s: the chart sets this one itself, from its other values; leave it out" $.role $.name $one.name) -}}
{{- end -}}
{{- end -}}
{{- $where := printf "%sPools.%s.autoscaling" .role .name -}}
{{- with .pool.autoscaling -}}
{{- if .enabled -}}
{{- if and $.root.Values.autoscale.enabled $.root.Values.autoscale.apply -}}
{{- fail (printf "%s.enabled and autoscale.apply: two would scale one pool; switch one of them off" $where) -}}
{{- end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s: minReplicas %v is above maxReplicas %v" $where .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if and (eq .kind "keda") (not $.root.Values.keda.prometheusAddress) -}}
{{- fail (printf "%s.kind keda: set keda.prometheusAddress to the Prometheus that has this release's metrics" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
