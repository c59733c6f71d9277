{{/* Models: their volumes, and the flags with which servers and routers find them. */}}

{{/*
Sets .served of the root context: a list with a root context for each model, in whose values model, speculative, prefillPools and
decodePools are that model's own. If there are several models, .Values.prefillPools and .Values.decodePools become the pools of
all of them: templates that concern every pool look there. A template returns only text, so this one changes its argument. It does
so once, as all templates of a rendering share the root context.
*/}}
{{- define "twinfang.readModels" -}}
{{- if not (hasKey . "served") -}}
{{- $root := . -}}
{{- $served := list $root -}}
{{- with .Values.models -}}
{{- include "twinfang.modelsChecks" $root -}}
{{- $served = list -}}
{{- $all := dict "prefillPools" dict "decodePools" dict -}}
{{- range $model := . -}}
{{- $own := mergeOverwrite (deepCopy $root.Values.model) (pick $model "name" "directory" "volume" "download") -}}
{{- $values := merge (dict "speculative" ($model.speculative | default $root.Values.speculative)) (omit $root.Values "model" "models" "prefillPools" "decodePools" "speculative") -}}
{{- $_ := set $values "model" $own -}}
{{- range $key := list "prefillPools" "decodePools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := get $model $key -}}
{{- if hasKey (get $all $key) $name -}}
{{- fail (printf "models: two models have a pool named %s in %s; the names become those of Deployments, so each may occur once in a release" $name $key) -}}
{{- end -}}
{{- $merged := mustMergeOverwrite (deepCopy ($model.poolDefaults | default dict)) ($pool | default dict) -}}
{{- $_ := set $pools $name $merged -}}
{{- $_ := set (get $all $key) $name $merged -}}
{{- end -}}
{{- $_ := set $values $key $pools -}}
{{- end -}}
{{- $served = append $served (dict "isOneOfSeveral" (gt (len $root.Values.models) 1) "Values" $values "Release" $root.Release "Chart" $root.Chart "Capabilities" $root.Capabilities "Files" $root.Files "Template" $root.Template) -}}
{{- end -}}
{{- range $key, $pools := $all -}}
{{- $_ := set $root.Values $key $pools -}}
{{- end -}}
{{- end -}}
{{- $_ := set $root "served" $served -}}
{{- end -}}
{{- end -}}

{{/* Refuses values of a release that has both a list of models and a model outside of it. */}}
{{- define "twinfang.modelsChecks" -}}
{{- range $key, $value := .Values.model -}}
{{- if or (and $value (ne $key "download")) (and (eq $key "download") $value.source) -}}
{{- fail (printf "model.%s and models are both set: move it into an entry of models" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "prefillPools" "decodePools" -}}
{{- range $name, $pool := get $.Values $key -}}
{{- if or $pool (ne $name "default") -}}
{{- fail (printf "%s.%s and models are both set: move the pool into the entry of its model" $key $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks one model. Takes its root context. */}}
{{- define "twinfang.modelChecks" -}}
{{- $model := .Values.model -}}
{{- if and $model.directory (not $model.volume) -}}
{{- fail (printf "model.directory %q: there is no model.volume for it to be in; set one, or leave both empty for the small model of the image" $model.directory) -}}
{{- end -}}
{{- if and $model.volume (not $model.directory) -}}
{{- fail "model.volume is set, but not model.directory: name the model's directory in it, or \".\" for its root" -}}
{{- end -}}
{{- if and (eq (clean $model.directory) ".") $model.directory (not $model.name) -}}
{{- fail "model.directory \".\" is no name that clients could use: set model.name" -}}
{{- end -}}
{{- if and $model.volume.image (semverCompare "<1.31-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.volume.image needs Kubernetes 1.31, this is %s: use a persistentVolumeClaim or a hostPath" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- with $model.download.source -}}
{{- if or (not $model.volume) $model.volume.image (eq (clean $model.directory) ".") -}}
{{- fail (printf "model.download.source %s: give it a directory below the root of a volume that can be written, a persistentVolumeClaim, a hostPath or an ephemeral one (model.directory, model.volume)" .) -}}
{{- end -}}
{{- if and $model.download.tokenSecret.name (not (hasPrefix "https:" .)) -}}
{{- fail (printf "model.download.tokenSecret: a token is sent over https alone, not to %s; credentials for s3 are in model.download.envSecret" .) -}}
{{- end -}}
{{- else -}}
{{- if $model.volume.ephemeral -}}
{{- fail "model.volume.ephemeral is empty at each pod's start: set model.download.source, from which the model is fetched" -}}
{{- end -}}
{{- end -}}
{{- if not .Values.decodePools -}}
{{- fail (printf "decodePools is empty: a router needs at least one decode server for model %s" (include "twinfang.model" .)) -}}
{{- end -}}
{{- $needsNoPrefill := false -}}
{{- range $name, $pool := .Values.decodePools -}}
{{- $flags := ($pool | default dict).flags | default dict -}}
{{- if or (eq (get $flags "role") "both") (eq (toString (get $flags "local-prefill")) "true") -}}
{{- $needsNoPrefill = true -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.prefillPools $needsNoPrefill) -}}
{{- fail (printf "prefillPools is empty, and no decode pool runs prompts of model %s itself: add a prefill pool, or set flags {role: both} on a decode pool" (include "twinfang.model" .)) -}}
{{- end -}}
{{- end -}}

{{- define "twinfang.modelPath" -}}
{{- if .Values.model.volume -}}
{{- clean (printf "/models/%s" .Values.model.directory) -}}
{{- end -}}
{{- end -}}

{{/* The volume's source. Takes a dictionary with name, volume, which is like model.volume, and whether an init container fetches. */}}
{{- define "twinfang.modelVolume" -}}
- name: {{ .name }}
  {{- $fetches := .fetches }}
  {{- with .volume }}
  {{- if .persistentVolumeClaim }}
  persistentVolumeClaim:
    claimName: {{ .persistentVolumeClaim.claimName | quote }}
    readOnly: {{ not $fetches }}
  {{- else if .hostPath }}
  hostPath:
    path: {{ .hostPath.path | quote }}
    type: Directory
  {{- else if .csi }}
  csi: {{- toYaml .csi | nindent 4 }}
  {{- else if .image }}
  image:
    reference: {{ .image.reference | quote }}
    pullPolicy: {{ .image.pullPolicy | default "IfNotPresent" }}
  {{- else if .ephemeral }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .ephemeral.storageClassName }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources:
          requests:
            storage: {{ .ephemeral.size }}
  {{- else if hasKey . "emptyDir" }}
  emptyDir: {}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Takes a dictionary with name and path. */}}
{{- define "twinfang.modelMount" -}}
- name: {{ .name }}
  mountPath: {{ .path }}
  readOnly: true
{{- end -}}

{{/* Seconds that fetching a model may take; 0 if it is not fetched. Takes the model's root context. */}}
{{- define "twinfang.downloadSeconds" -}}
{{- with .Values.model.download }}{{ ternary .timeoutSeconds 0 (ne .source "") | int }}{{ end -}}
{{- end -}}

{{/*
The init container that fetches a model into its volume. Takes a dictionary with root (the model's), image, volume and mount (the
volume's name and path), directory and weights. The file with a token is in a volume that only this container mounts.
*/}}
{{- define "twinfang.fetchContainer" -}}
{{- $download := .root.Values.model.download -}}
- name: fetch-{{ .volume }}
  image: {{ include "twinfang.image" (dict "image" .image "root" .root) | quote }}
  imagePullPolicy: {{ .image.pullPolicy }}
  args:
    - fetch-model
    - {{ printf "--source=%s" $download.source | quote }}
    - {{ printf "--directory=%s" .directory | quote }}
    - --timeout={{ int $download.timeoutSeconds }}
    {{- if not .weights }}
    - --without-weights
    {{- end }}
    {{- if $download.tokenSecret.name }}
    - {{ printf "--token-file=/etc/twinfang/source/%s" $download.tokenSecret.key | quote }}
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    {{- with include "twinfang.env" $download.env | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with $download.envSecret }}
  envFrom:
    - secretRef:
        name: {{ . | quote }}
  {{- end }}
  # The line in which it says why it ended, for kubectl describe.
  terminationMessagePolicy: FallbackToLogsOnError
  resources: {{- toYaml $download.resources | nindent 4 }}
  securityContext: {{- include "twinfang.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: {{ .volume }}
      mountPath: {{ .mount }}
    {{- if $download.tokenSecret.name }}
    - name: {{ .volume }}-token
      mountPath: /etc/twinfang/source
      readOnly: true
    {{- end }}
{{- end -}}

{{/* The volume with the token. Takes a dictionary with root (the model's) and volume. */}}
{{- define "twinfang.fetchToken" -}}
{{- if .root.Values.model.download.tokenSecret.name -}}
- name: {{ .volume }}-token
  secret:
    secretName: {{ .root.Values.model.download.tokenSecret.name | quote }}
    defaultMode: 0440
{{- end -}}
{{- end -}}

{{/*
Where routers find the models, as a list: name, directory as a path in the router's pod, and volume, mount and source of the volume
that has it. One volume that has all of them, router.modelVolume, is mounted once; else each model's own is, and several models'
below numbers, since directories of two volumes may have the same name. Of a model that is fetched, a router shares the claim that
has it, else it fetches what it reads itself: fetches is all, small or empty.
*/}}
{{- define "twinfang.routerModels" -}}
{{- $several := gt (len .served) 1 -}}
{{- range $i, $one := .served }}
{{- $model := $one.Values.model }}
{{- $own := $.Values.router.modelVolume }}
{{- $below := and $several (not $own) }}
- name: {{ include "twinfang.model" $one | quote }}
  {{- $fetches := ternary "small" "" (and (ne $model.download.source "") (not $own)) }}
  {{- if and $fetches $model.volume.persistentVolumeClaim }}
  {{- $fetches = "all" }}
  {{- end }}
  fetches: {{ $fetches | quote }}
  {{- with $own | default (ternary (dict "emptyDir" dict) $model.volume (eq $fetches "small")) }}
  directory: {{ clean (printf "/models/%s/%s" (ternary (toString $i) "" $below) $model.directory) | quote }}
  volume: {{ ternary (printf "model-%d" $i) "model" $below }}
  mount: {{ ternary (printf "/models/%d" $i) "/models" $below }}
  source: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The init containers of a router's pod. */}}
{{- define "twinfang.routerFetches" -}}
{{- range $i, $model := include "twinfang.routerModels" . | fromYamlArray }}
{{- if $model.fetches }}
{{ include "twinfang.fetchContainer" (dict "root" (index $.served $i) "image" $.Values.routerImage "volume" $model.volume "mount" $model.mount "directory" $model.directory "weights" (eq $model.fetches "all")) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The mounts of a router's models. Several models may share one volume. */}}
{{- define "twinfang.routerModelMounts" -}}
{{- $seen := dict }}
{{- range include "twinfang.routerModels" . | fromYamlArray }}
{{- if and .volume (not (hasKey $seen .volume)) }}
{{- $_ := set $seen .volume true }}
{{ include "twinfang.modelMount" (dict "name" .volume "path" .mount) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The volumes of a router's models, and those with the tokens by which they are fetched. */}}
{{- define "twinfang.routerModelVolumes" -}}
{{- $seen := dict }}
{{- range $i, $model := include "twinfang.routerModels" . | fromYamlArray }}
{{- if and .volume (not (hasKey $seen .volume)) }}
{{- $_ := set $seen .volume true }}
{{ include "twinfang.modelVolume" (dict "name" .volume "volume" .source "fetches" .fetches) }}
{{- end }}
{{- if .fetches }}
{{- with include "twinfang.fetchToken" (dict "root" (index $.served $i) "volume" .volume) }}
{{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
