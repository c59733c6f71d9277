{{/* The model: where it is mounted, and the flags with which servers and routers find it. */}}

{{- define "twinfang.modelPath" -}}
{{- if .Values.model.volume -}}
{{- clean (printf "/models/%s" .Values.model.directory) -}}
{{- end -}}
{{- end -}}

{{/* The volume's source. Takes a dictionary like model.volume. */}}
{{- define "twinfang.modelVolume" -}}
- name: model
  {{- if .persistentVolumeClaim }}
  persistentVolumeClaim:
    claimName: {{ .persistentVolumeClaim.claimName | quote }}
    readOnly: true
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
  {{- end }}
{{- end -}}

{{- define "twinfang.modelMount" -}}
- name: model
  mountPath: /models
  readOnly: true
{{- end -}}
