{{- define "bootseer.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "bootseer.labels" -}}
app.kubernetes.io/name: bootseer
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "bootseer.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "bootseer.serviceEnv" -}}
- name: BOOTSEER_SERVICE_DATA
  value: /var/lib/bootseer/service
{{- with .Values.service.databaseSecret }}
- name: BOOTSEER_SERVICE_DATABASE
  valueFrom: {secretKeyRef: {name: {{ . }}, key: url}}
{{- end }}
{{- with .Values.service.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "bootseer.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "bootseer.health" -}}
{{- /* Not /healthz: while lines cannot be stored, senders get 503 and keep them, and the pages are served. */ -}}
httpGet:
  path: /static/service.css
  port: http
{{- if .Values.service.tlsSecret }}
  scheme: HTTPS
{{- end }}
{{- end }}
