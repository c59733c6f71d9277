{{/* Refuses values that contradict one another, which the schema can't see. Each error names them and a remedy. */}}

{{- define "twinfang.checks" -}}
{{- include "twinfang.readModels" . -}}
{{- $names := list -}}
{{- range $model := .served -}}
{{- include "twinfang.modelChecks" $model -}}
{{- include "twinfang.sameFlagsChecks" $model -}}
{{- $name := include "twinfang.model" $model -}}
{{- if has $name $names -}}
{{- fail (printf "models: two entries are named %q, and requests choose a model by its name: give one of them another name" $name) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- $values := .Values -}}
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
{{- include "twinfang.imageChecks" (dict "where" "image" "image" $values.image) -}}
{{- include "twinfang.imageChecks" (dict "where" "routerImage" "image" $values.routerImage) -}}
{{- include "twinfang.routerChecks" . -}}
{{- include "twinfang.tlsChecks" . -}}
{{- include "twinfang.strategyChecks" (dict "where" "router" "strategy" $values.router.strategy) -}}
{{- $ports := splitList "-" $values.nixl.portRange -}}
{{- if or (gt (int (first $ports)) (int (last $ports))) (gt (int (last $ports)) 65535) -}}
{{- fail (printf "nixl.portRange %q: give the lower port first, and none above 65535" $values.nixl.portRange) -}}
{{- end -}}
{{- if and $values.auth.apiKeys.existingSecret $values.auth.apiKeys.lines -}}
{{- fail "auth.apiKeys: existingSecret and lines are both set, and routers read only one file of keys; leave one of them out" -}}
{{- end -}}
{{- if and $values.auth.limitStore.existingSecret $values.auth.limitStore.url -}}
{{- fail "auth.limitStore: existingSecret and url are both set, and routers use only one store; leave one of them out" -}}
{{- end -}}
{{- $admin := $values.auth.adminToken -}}
{{- if and $admin.existingSecret $admin.digest -}}
{{- fail "auth.adminToken: existingSecret and digest are both set, and there is only one token; leave one of them out" -}}
{{- end -}}
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

{{/* Refuses an image's name that brings its tag or digest along. Takes a dictionary with image and where it is set. */}}
{{- define "twinfang.imageChecks" -}}
{{- $last := splitList "/" .image.repository | last -}}
{{- if or (contains ":" $last) (contains "@" $last) -}}
{{- fail (printf "%s.repository %q: a tag goes into %s.tag, a digest into %s.digest" .where .image.repository .where .where) -}}
{{- end -}}
{{- end -}}

{{/*
Refuses pools of one model that could not read each other's state. Without this check decode servers would run all prompts
themselves (--local-prefill), and prefill servers would do nothing. Takes the model's root context.
*/}}
{{- define "twinfang.sameFlagsChecks" -}}
{{- $names := list "dtype" "weight-dtype" "block-size" "kv-cache-dtype" "mamba-ssm-cache-dtype" "enable-mamba-cache-stochastic-rounding" "batch-invariant" -}}
{{- $common := .Values.poolDefaults.flags | default dict -}}
{{- $first := dict -}}
{{- range $key := list "prefillPools" "decodePools" -}}
{{- range $pool, $own := get $.Values $key -}}
{{- $flags := mergeOverwrite (deepCopy $common) (($own | default dict).flags | default dict) -}}
{{- range $name := $names -}}
{{- $value := get $flags $name | default "auto" | toString -}}
{{- $shown := ternary "the default" $value (eq $value "auto") -}}
{{- $here := dict "value" $value "says" (printf "%s.%s has %s" $key $pool $shown) -}}
{{- $other := get $first $name | default $here -}}
{{- if ne $value $other.value -}}
{{- fail (printf "flags.%s: %s and %s, and servers of one model can't read each other's state unless it is the same; set it in poolDefaults.flags alone" $name $other.says $here.says) -}}
{{- end -}}
{{- $_ := set $first $name $other -}}
{{- end -}}
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
