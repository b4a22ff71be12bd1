{{- /* Labels of all objects of a release; with a component, of those of one service. */ -}}
{{- define "slipstream.labels" -}}
app.kubernetes.io/name: slipstream
app.kubernetes.io/instance: {{ .release }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "slipstream.image" -}}
{{ .Values.image.registry }}{{ .image }}:{{ .Values.image.tag }}
{{- end }}

{{- /* What the restricted pod security standard asks of a pod, and of a container. */ -}}
{{- define "slipstream.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001 # Secrets are readable for it
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "slipstream.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
