{{/* The parts that pods of routers and of servers have in common, and what values add to them. */}}

{{/* No privileges; only volumes are writable. */}}
{{- define "twinfang.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A Deployment's strategy. Takes a dictionary like router.strategy. */}}
{{- define "twinfang.strategy" -}}
type: {{ .type }}
{{- if eq .type "RollingUpdate" }}
rollingUpdate: {{- toYaml .rollingUpdate | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
A pod template: what the chart says of the pod, plus what the values add to it, with podSpec over both. Takes a dictionary
with labels, annotations and spec (the chart's own, as YAML), values (a pool's or the router's) and where (their name in
errors). The first container of spec is the chart's own.
*/}}
{{- define "twinfang.podTemplate" -}}
{{- $spec := fromYaml .spec -}}
{{- $own := first $spec.containers -}}
{{- with .values -}}
{{- $_ := set $own "env" (concat $own.env (.extraEnv | default list)) -}}
{{- $_ := set $own "volumeMounts" (concat $own.volumeMounts (.extraVolumeMounts | default list)) -}}
{{- $_ := set $spec "volumes" (concat $spec.volumes (.extraVolumes | default list)) -}}
{{- $_ := set $spec "containers" (concat $spec.containers (.sidecars | default list)) -}}
{{- with concat (.initContainers | default list) ($spec.initContainers | default list) -}}
{{- $_ := set $spec "initContainers" . -}}
{{- end -}}
{{- end -}}
{{- include "twinfang.unique" (dict "list" $own.env "found" (printf "%s.env or extraEnv: the variable %%s is set twice, or by the chart as well; leave it out" .where)) -}}
{{- include "twinfang.unique" (dict "list" $spec.volumes "found" (printf "%s.extraVolumes: the pod has a volume %%s already; choose another name, or put yours in its place with podSpec.volumes" .where)) -}}
{{- include "twinfang.unique" (dict "list" $spec.containers "found" (printf "%s.sidecars: the pod has a container %%s already; choose another name, or change that one with podSpec.containers" .where)) -}}
metadata:
  labels: {{- include "twinfang.joined" (dict "own" .labels "more" .values.podLabels "where" (printf "%s.podLabels" .where)) | nindent 4 }}
  {{- with include "twinfang.joined" (dict "own" .annotations "more" .values.podAnnotations "where" (printf "%s.podAnnotations" .where)) }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
spec: {{- include "twinfang.patched" (dict "spec" $spec "patch" .values.podSpec) | nindent 2 }}
{{- end -}}

{{/* Refuses a list with two entries of one name. Takes a dictionary with list and found, the error with %s for the name. */}}
{{- define "twinfang.unique" -}}
{{- $names := dict -}}
{{- range .list -}}
{{- if hasKey $names .name -}}
{{- fail (printf $.found .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- end -}}

{{/*
Labels or annotations of the chart (own, as YAML) and those of the values (more), as YAML. Refuses those that the chart
sets, because selectors and discovery depend on them. Takes also where, the name in errors.
*/}}
{{- define "twinfang.joined" -}}
{{- $own := fromYaml .own -}}
{{- range $name, $_ := .more -}}
{{- if hasKey $own $name -}}
{{- fail (printf "%s: the chart sets %s itself; leave it out" $.where $name) -}}
{{- end -}}
{{- end -}}
{{- with merge $own (.more | default dict) -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/*
A pod's specification with a patch over it, as YAML. Maps are merged. Containers of one name are merged, a volume takes
the place of that of its name, and any other list replaces the chart's. Takes a dictionary with spec and patch.
*/}}
{{- define "twinfang.patched" -}}
{{- $patch := deepCopy (.patch | default dict) -}}
{{- range $list := list "containers" "initContainers" "volumes" -}}
{{- if hasKey $patch $list -}}
{{- $names := list -}}
{{- $found := dict -}}
{{- range concat (get $.spec $list | default list) (get $patch $list) -}}
{{- if not (hasKey $found .name) -}}
{{- $names = append $names .name -}}
{{- $_ := set $found .name . -}}
{{- else if eq $list "volumes" -}}
{{- $_ := set $found .name . -}}
{{- else -}}
{{- $_ := set $found .name (mustMergeOverwrite (get $found .name) .) -}}
{{- end -}}
{{- end -}}
{{- $entries := list -}}
{{- range $names -}}
{{- $entries = append $entries (get $found .) -}}
{{- end -}}
{{- $_ := set $patch $list $entries -}}
{{- end -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite .spec $patch) -}}
{{- end -}}
