{{/* Ray's token, for every container that connects to Ray. KubeRay doesn't replace an entry that exists. */}}
{{- define "kvrelay.authEnv" -}}
{{- if .Values.auth.enabled -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "kvrelay.authSecret" . }}
      key: auth_token
{{- end -}}
{{- end -}}

{{/* Where `kvrelay up` records the cluster for `kvrelay status`: beside Ray's files, so both are lost together. */}}
{{- define "kvrelay.stateEnv" -}}
- name: KVRELAY_STATE_DIR
  value: /tmp/ray/kvrelay
{{- end -}}

{{/* The pod fields that every group takes from its values. Argument: {root, values}. */}}
{{- define "kvrelay.podOptions" -}}
serviceAccountName: {{ include "kvrelay.serviceAccountName" .root }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
terminationGracePeriodSeconds: {{ .root.Values.terminationGracePeriodSeconds }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with index $.values $field }}
{{ $field }}:{{ if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- if and (eq (default "" .group) "router") (not .values.topologySpreadConstraints) }}
topologySpreadConstraints:
  {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        app.kubernetes.io/instance: {{ $.root.Release.Name }}
        app.kubernetes.io/component: router
  {{- end }}
{{- end }}
{{- $logs := and .root.Values.actorLogs.enabled (include "kvrelay.nativeSidecars" .root) }}
{{- if or .values.extraInitContainers (and .model (include "kvrelay.prefetches" .root)) $logs }}
initContainers:
  {{- with .values.extraInitContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if and .model (include "kvrelay.prefetches" .root) }}
  - name: model
    image: {{ include "kvrelay.image" (dict "root" .root "image" .values.image) }}
    imagePullPolicy: {{ default .root.Values.image.pullPolicy .values.image.pullPolicy }}
    command: [python, -m, kvrelay.models, {{ .root.Values.model.path | quote }}{{ if eq .group "router" }}, --no-weights{{ end }}]
    env:
      {{- include "kvrelay.hubEnv" .root | nindent 6 }}
    resources:
      {{- include "kvrelay.resources" (dict "root" .root "values" (dict "resources" (dict "cpu" "1" "memory" "2Gi"))) | nindent 6 }}
    securityContext:
      {{- toYaml .root.Values.securityContext | nindent 6 }}
    volumeMounts:
      - name: hub
        mountPath: {{ .root.Values.model.hub.mountPath }}
  {{- end }}
  {{- if $logs }}
  {{- include "kvrelay.logsContainer" . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Not empty if Kubernetes ends an init container with restartPolicy Always after the pod's other containers. */}}
{{- define "kvrelay.nativeSidecars" -}}
{{- if semverCompare ">= 1.29.0-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end -}}

{{/* The logs' container where it can't be an init container. Argument: {root, values}. */}}
{{- define "kvrelay.plainLogsContainer" -}}
{{- if and .root.Values.actorLogs.enabled (not (include "kvrelay.nativeSidecars" .root)) -}}
{{- include "kvrelay.logsContainer" . }}
{{- end -}}
{{- end -}}

{{/* Not empty if the model is one of the Hugging Face hub. */}}
{{- define "kvrelay.onHub" -}}
{{- if regexMatch "^(hf:|[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_])" .Values.model.path }}true{{ end -}}
{{- end -}}

{{/* Not empty if an init container downloads the model. */}}
{{- define "kvrelay.prefetches" -}}
{{- if and (include "kvrelay.onHub" .) .Values.model.hub.prefetch }}true{{ end -}}
{{- end -}}

{{/* Environment of a container that reads a model of the hub. */}}
{{- define "kvrelay.hubEnv" -}}
- name: HF_HOME
  value: {{ .Values.model.hub.mountPath }}
{{- with .Values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- end -}}

{{/*
What prints the actors' logs. It reads the files that Ray writes them to, from the volume of /tmp/ray. It has to outlive
the pod's drain: as an init container that goes on it does, else it is told to stop only when the drain is over.
Argument: {root, values}.
*/}}
{{- define "kvrelay.logsContainer" -}}
- name: logs
  image: {{ include "kvrelay.image" (dict "root" .root "image" .values.image) }}
  imagePullPolicy: {{ default .root.Values.image.pullPolicy .values.image.pullPolicy }}
  {{- if include "kvrelay.nativeSidecars" .root }}
  restartPolicy: Always
  {{- else }}
  lifecycle:
    preStop:
      exec:
        command: [sleep, {{ addf .root.Values.drainSeconds 5 | quote }}]
  {{- end }}
  command: [python, -m, kvrelay.cluster.ray.follow, /tmp/ray]
  resources:
    {{- include "kvrelay.resources" (dict "root" .root "values" .root.Values.actorLogs) | nindent 4 }}
  securityContext:
    {{- toYaml .root.Values.securityContext | nindent 4 }}
  volumeMounts:
    - name: ray-logs
      mountPath: /tmp/ray
      readOnly: true
{{- end -}}

{{/*
Metadata of a group's pods. Argument: {root, group, values}.

app.kubernetes.io/name and created-by are KubeRay's own: its head Service selects by them. Nothing here changes with the
chart's version alone, and the checksum makes a changed configuration a changed template: KubeRay's upgradeStrategy
replaces the pods when the templates change.
*/}}
{{- define "kvrelay.podMetadata" -}}
labels:
  app.kubernetes.io/instance: {{ .root.Release.Name }}
  app.kubernetes.io/component: {{ .group }}
  app.kubernetes.io/part-of: {{ include "kvrelay.name" .root }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include (print .root.Template.BasePath "/configmap.yaml") .root | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Secret with the join token. */}}
{{- define "kvrelay.joinTokenSecret" -}}
{{- default (printf "%s-join" (include "kvrelay.fullname" .)) .Values.security.joinTokenSecret -}}
{{- end -}}

{{/* Volumes of a pod. Argument: {root, values, model: whether it reads the model, parts: kvrelay's roles in it}. */}}
{{- define "kvrelay.volumes" -}}
- name: shared-mem
  emptyDir:
    medium: Memory
    sizeLimit: {{ .values.shmSize }}
- name: join-token
  secret:
    secretName: {{ include "kvrelay.joinTokenSecret" .root }}
    defaultMode: 0440
{{- $tls := .root.Values.security.tls }}
{{- if $tls.enabled }}
- name: certificates
  projected:
    defaultMode: 0440
    sources:
      {{- range $index, $part := .parts }}
      - secret:
          name: {{ index $tls.secrets $part }}
          items:
            - {key: tls.crt, path: {{ $part }}.crt}
            - {key: tls.key, path: {{ $part }}.key}
            {{- if eq $index 0 }}
            - {key: ca.crt, path: ca.crt}
            {{- end }}
      {{- end }}
{{- end }}
{{- if has "router" .parts }}
{{- with .root.Values.router.tlsSecret }}
- name: public-certificate
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .root.Values.router.apiKeysSecret }}
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- if and .model .root.Values.model.volume.source }}
- name: model
  {{- toYaml .root.Values.model.volume.source | nindent 2 }}
{{- end }}
{{- if and .model (include "kvrelay.onHub" .root) }}
- name: hub
  {{- toYaml (default (dict "emptyDir" (dict)) .root.Values.model.hub.source) | nindent 2 }}
{{- end }}
# Ray's sockets and logs. KubeRay gives the autoscaler the volume of this name.
- name: ray-logs
  emptyDir: {}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Argument: as of kvrelay.volumes. */}}
{{- define "kvrelay.volumeMounts" -}}
- name: shared-mem
  mountPath: /dev/shm
- name: join-token
  mountPath: /etc/kvrelay-secrets/join
  readOnly: true
{{- if .root.Values.security.tls.enabled }}
- name: certificates
  mountPath: /etc/kvrelay-secrets/certificates
  readOnly: true
{{- end }}
{{- if has "router" .parts }}
{{- if .root.Values.router.tlsSecret }}
- name: public-certificate
  mountPath: /etc/kvrelay-secrets/public
  readOnly: true
{{- end }}
{{- if .root.Values.router.apiKeysSecret }}
- name: api-keys
  mountPath: /etc/kvrelay-secrets/api-keys
  readOnly: true
{{- end }}
{{- end }}
{{- if and .model .root.Values.model.volume.source }}
- name: model
  mountPath: {{ .root.Values.model.volume.mountPath }}
  readOnly: {{ .root.Values.model.volume.readOnly }}
{{- end }}
{{- if and .model (include "kvrelay.onHub" .root) }}
- name: hub
  mountPath: {{ .root.Values.model.hub.mountPath }}
{{- end }}
- name: ray-logs
  mountPath: /tmp/ray
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Health of a Ray node: its raylet's, and on the head the GCS's. KubeRay would inject the same with Ray 2.53 or newer,
but older operators inject a `wget` command, which the image doesn't have. The path needs no token.
*/}}
{{- define "kvrelay.rayHealth" -}}
httpGet:
  path: /api/healthz
  port: 52365
{{- end -}}

{{/* A container of Ray's has as long to start as startupSeconds says; then it is restarted when it doesn't answer. */}}
{{- define "kvrelay.probes" -}}
startupProbe:
  {{- include "kvrelay.rayHealth" . | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ divf .root.Values.startupSeconds 5 | ceil | int }}
livenessProbe:
  {{- include "kvrelay.rayHealth" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end -}}

{{/* A worker's securityContext with what RDMA adds to it. Argument: {root, handsOff}. */}}
{{- define "kvrelay.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if and .handsOff .root.Values.rdma.enabled .root.Values.rdma.ipcLock -}}
{{- $capabilities := default (dict) $context.capabilities -}}
{{- $_ := set $capabilities "add" (append (default (list) $capabilities.add) "IPC_LOCK" | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Quantities of a container, as both requests and limits. Argument: {root, values, handsOff}. */}}
{{- define "kvrelay.resources" -}}
{{- $amounts := dict "cpu" (toString .values.resources.cpu) "memory" .values.resources.memory -}}
{{- if gt (int .values.gpus) 0 -}}
{{- $_ := set $amounts .values.gpuResource (toString .values.gpus) -}}
{{- end -}}
{{- with .root.Values.rdma -}}
{{- if and $.handsOff .enabled .resource -}}
{{- $_ := set $amounts .resource (toString .count) -}}
{{- end -}}
{{- end -}}
requests:
  {{- toYaml $amounts | nindent 2 }}
limits:
  {{- toYaml $amounts | nindent 2 }}
{{- end -}}

{{/* Argument: {root, values, handsOff}. */}}
{{- define "kvrelay.workerEnv" -}}
{{ include "kvrelay.authEnv" .root }}
- name: KVRELAY_DRAIN_DIR
  value: /tmp/kvrelay-drain
- name: RAY_worker_niceness
  value: "0"
{{- if include "kvrelay.onHub" .root }}
{{ include "kvrelay.hubEnv" .root }}
{{- end }}
{{- if .handsOff }}
{{- range $name, $value := .root.Values.nccl }}
- name: {{ $name }}
  value: {{ toString $value | quote }}
{{- end }}
{{- end }}
{{- with .values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
One worker group. Argument: {root, group, parts, values, replicas, bounds, handsOff, readinessProbe, ports, model}.

`resources` offers one unit for each worker of a pod; the configuration makes each actor take one, so no more of them
share a pod than it is for. Workers of all roles take the same resource: one that changes its role keeps its place, and
so does its successor. The label says for which role the group is meant. The resource's value is JSON in single quotes, because KubeRay pastes it into
a shell command and also parses it itself: with the escaped double quotes of many examples that parse fails, and then
KubeRay leaves out num-gpus. (num-gpus is given here anyway.)
*/}}
{{- define "kvrelay.workerGroup" -}}
groupName: {{ .group }}
labels:
  kvrelay.io/role: {{ .group }}
replicas: {{ .replicas }}
minReplicas: {{ .bounds.min }}
maxReplicas: {{ .bounds.max }}
{{- if ne .group "router" }}
{{- $hosts := include "kvrelay.hosts" . | int }}
{{- if gt $hosts 1 }}
# Pods of one worker: they are created, scaled and deleted together.
numOfHosts: {{ $hosts }}
{{- end }}
{{- end }}
rayStartParams:
  num-cpus: {{ include "kvrelay.wholeCpus" .values.resources.cpu | quote }}
  num-gpus: {{ int .values.gpus | quote }}
  resources: {{ printf "'%s'" (dict (include "kvrelay.resource" .group) (include "kvrelay.workersPerPod" . | int) | toJson) | quote }}
  object-store-memory: {{ int64 .root.Values.ray.objectStoreMemoryBytes | quote }}
template:
  metadata:
    {{- include "kvrelay.podMetadata" . | nindent 4 }}
  spec:
    automountServiceAccountToken: false
    {{- include "kvrelay.podOptions" . | nindent 4 }}
    {{- if and .handsOff .root.Values.rdma.enabled .root.Values.rdma.hostNetwork }}
    hostNetwork: true
    dnsPolicy: ClusterFirstWithHostNet
    {{- end }}
    containers:
      - name: ray-worker
        image: {{ include "kvrelay.image" (dict "root" .root "image" .values.image) }}
        imagePullPolicy: {{ default .root.Values.image.pullPolicy .values.image.pullPolicy }}
        {{- with include "kvrelay.workerEnv" . | trim }}
        env:
          {{- . | nindent 10 }}
        {{- end }}
        ports:
          - name: metrics
            containerPort: 8080
          {{- $metrics := index .root.Values.metrics (ternary "routerPort" "workerPort" (eq .group "router")) }}
          {{- with $metrics }}
          - name: own-metrics
            containerPort: {{ . }}
          {{- end }}
          {{- with .ports }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        readinessProbe:
          {{- .readinessProbe | nindent 10 }}
        {{- include "kvrelay.probes" . | nindent 8 }}
        # The members of the pod finish their requests before Ray is told to stop.
        lifecycle:
          preStop:
            exec:
              command: [python, -m, kvrelay.cluster.ray.node_drain, {{ addf .root.Values.drainSeconds 5 | quote }}]
        resources:
          {{- include "kvrelay.resources" . | nindent 10 }}
        securityContext:
          {{- include "kvrelay.securityContext" . | nindent 10 }}
        volumeMounts:
          {{- include "kvrelay.volumeMounts" . | nindent 10 }}
      {{- with include "kvrelay.plainLogsContainer" . }}
      {{- . | nindent 6 }}
      {{- end }}
    volumes:
      {{- include "kvrelay.volumes" . | nindent 6 }}
{{- end -}}
