{{- /* The Deployment of one service; `service` is its name, `grace` the seconds that its end may take. */ -}}
{{- define "slipstream.deployment" -}}
{{- $own := index .Values .service -}}
{{- $labels := dict "release" .Release.Name "component" .service -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .Release.Name }}-{{ .service }}
  labels:
    {{- include "slipstream.labels" $labels | nindent 4 }}
spec:
  {{- if not .Values.autoscaling.kind }}
  replicas: {{ $own.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  progressDeadlineSeconds: 1800 # a large model takes its time
  strategy:
    type: RollingUpdate
    rollingUpdate: {{ toJson $own.strategy }}
  selector:
    matchLabels:
      {{- include "slipstream.labels" $labels | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "slipstream.labels" $labels | nindent 8 }}
      annotations:
        kubectl.kubernetes.io/default-container: {{ .service }}
    spec:
      terminationGracePeriodSeconds: {{ .grace }}
      automountServiceAccountToken: false
      enableServiceLinks: false # their variables would look like settings
      shareProcessNamespace: true # its first process takes up what dead children leave behind
      securityContext:
        {{- include "slipstream.podSecurity" . | nindent 8 }}
      {{- with .Values.image.pullSecrets }}
      imagePullSecrets: {{ toJson . }}
      {{- end }}
      {{- with $own.nodeSelector }}
      nodeSelector: {{ toJson . }}
      {{- end }}
      tolerations:
        {{- range list "not-ready" "unreachable" }} # of a node; 300 s by default
        - {key: node.kubernetes.io/{{ . }}, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
        {{- end }}
        {{- range $own.tolerations }}
        - {{ toJson . }}
        {{- end }}
      topologySpreadConstraints:
        {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
        - topologyKey: {{ . }}
          maxSkew: 1
          whenUnsatisfiable: ScheduleAnyway
          matchLabelKeys: [pod-template-hash]
          labelSelector:
            matchLabels:
              {{- include "slipstream.labels" $labels | nindent 14 }}
        {{- end }}
      containers:
        - name: {{ .service }}
          image: {{ include "slipstream.image" (dict "Values" .Values "image" $own.image) }}
          imagePullPolicy: {{ .Values.image.pullPolicy }}
          env:
            - {name: SLIPSTREAM_MODEL__PATH, value: {{ .Values.model.path | quote }}}
            - {name: SLIPSTREAM_LINKS__ROUTERS, value: "tcp://{{ .Release.Name }}-routers:7000"}
            - {name: SLIPSTREAM_LINKS__RUN_DIR, value: /tmp/slipstream} # which the service makes for itself
            - {name: XDG_CACHE_HOME, value: {{ if eq (toString $own.device) "cuda" }}/var/cache{{ else }}/tmp{{ end }}}
            {{- if .Values.model.volume }}
            - {name: HF_HOME, value: /models/hub}
            {{- end }}
            {{- if eq .service "router" }}
            {{- with .Values.secrets.api }}
            - {name: SLIPSTREAM_ROUTER__API_KEYS_FILE, value: /etc/slipstream-api/api-keys.toml}
            - name: SLIPSTREAM_ROUTER__METRICS_TOKEN
              valueFrom: {secretKeyRef: {name: {{ . }}, key: metrics-token}}
            {{- end }}
            {{- else if eq .service "compute" }}
            - {name: SLIPSTREAM_COMPUTE__DEVICE, value: {{ $own.device }}}
            - name: SLIPSTREAM_COMPUTE__NUM_THREADS
              valueFrom: {resourceFieldRef: {resource: requests.cpu}}
            {{- end }}
            {{- with $own.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - {name: links, containerPort: 7000}
            {{- if eq .service "router" }}
            - {name: http, containerPort: 8000}
            {{- end }}
          resources: {{ toJson $own.resources }}
          startupProbe: # until its packages are loaded; from then on it says itself that it gets on
            exec: {command: [slipstream, health, {{ .service }}, --live]}
            periodSeconds: 2
            timeoutSeconds: 30
            failureThreshold: 150
          # Fails only for what hangs, not for what loads, drains or is ill; that a busy node is slow to ask
          # is no hang either, hence the long timeout.
          livenessProbe:
            exec: {command: [slipstream, health, {{ .service }}, --live]}
            periodSeconds: 5
            timeoutSeconds: 30
            failureThreshold: 2
            terminationGracePeriodSeconds: 1 # what hangs does not drain
          readinessProbe:
            {{- $live := and (eq .service "router") .Values.router.readyWithoutWorkers }}
            exec: {command: [slipstream, health, {{ .service }}{{ if $live }}, --live{{ end }}]}
            periodSeconds: 5
            timeoutSeconds: 30
            failureThreshold: 3 # longer than hold_s: a router without workers holds requests first
          {{- if eq .service "router" }}
          lifecycle:
            preStop: # balancers hear of its end before it accepts no more
              exec: {command: [sleep, "5"]}
          {{- end }}
          securityContext:
            {{- include "slipstream.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: links, mountPath: /var/lib/slipstream/keys, readOnly: true}
            {{- if and (eq .service "router") .Values.secrets.api }}
            - {name: api, mountPath: /etc/slipstream-api, readOnly: true}
            {{- end }}
            {{- if .Values.model.volume }}
            - {name: models, mountPath: /models, readOnly: true}
            {{- end }}
            {{- with $own.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: tmp
          emptyDir: {medium: Memory, sizeLimit: 128Mi}
        - name: links # the secret keys of this service alone
          secret:
            secretName: {{ .Values.secrets.links }}
            defaultMode: 0440
            items:
              {{- range list "server.public" "router.public" "tokenizer.public" "compute.public" "detokenizer.public" "server.secret" (printf "%s.secret" .service) }}
              - {key: {{ . }}, path: {{ . }}}
              {{- end }}
        {{- if eq .service "router" }}
        {{- with .Values.secrets.api }}
        - name: api
          secret:
            secretName: {{ . }}
            defaultMode: 0440
            items:
              - {key: api-keys.toml, path: api-keys.toml}
        {{- end }}
        {{- end }}
        {{- with .Values.model.volume }}
        - {{ toJson (merge (dict "name" "models") .) }}
        {{- end }}
        {{- with $own.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
---
# One at a time: what is evicted drains, and what was on it goes on elsewhere.
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .Release.Name }}-{{ .service }}
  labels:
    {{- include "slipstream.labels" $labels | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "slipstream.labels" $labels | nindent 6 }}
{{- end }}
