{{/* Name of the chart in labels. */}}
{{- define "kvrelay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/*
Name of the RayCluster. KubeRay wants a DNS-1035 label and cuts what it derives from it ("<name>-head-svc",
"<name>-colocated-worker-...") at 50 characters from the front, so 40 keep every derived name whole.
*/}}
{{- define "kvrelay.fullname" -}}
{{- $name := "" -}}
{{- if .Values.fullnameOverride -}}
{{- $name = .Values.fullnameOverride -}}
{{- else if contains (include "kvrelay.name" .) .Release.Name -}}
{{- $name = .Release.Name -}}
{{- else -}}
{{- $name = printf "%s-%s" .Release.Name (include "kvrelay.name" .) -}}
{{- end -}}
{{- $name = $name | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q can't name a RayCluster; allowed: lower-case letters, digits and '-', starting with a letter. Set fullnameOverride." $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "kvrelay.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvrelay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvrelay.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kvrelay.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Labels that KubeRay sets on every pod of a group; templates can't change them. Argument: {root, group}. */}}
{{- define "kvrelay.groupSelector" -}}
ray.io/cluster: {{ include "kvrelay.fullname" .root }}
ray.io/group: {{ .group }}
{{- end -}}

{{- define "kvrelay.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvrelay.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Secret with Ray's token. KubeRay names the one that it makes like the RayCluster. */}}
{{- define "kvrelay.authSecret" -}}
{{- default (include "kvrelay.fullname" .) .Values.auth.existingSecret -}}
{{- end -}}

{{/* Argument: {root, image: a group's overrides}. */}}
{{- define "kvrelay.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (default (dict) .image) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Whole CPUs of a quantity ("1500m" is 1), at least 1: Ray's num-cpus, and the threads of a forward pass. */}}
{{- define "kvrelay.wholeCpus" -}}
{{- $cpu := toString . -}}
{{- if hasSuffix "m" $cpu -}}
{{- max 1 (div (trimSuffix "m" $cpu | int64) 1000) -}}
{{- else -}}
{{- max 1 (floor (float64 $cpu) | int64) -}}
{{- end -}}
{{- end -}}

{{/* Ray's custom resource of a group: workers of every role take the same one, so that they can change their roles. */}}
{{- define "kvrelay.resource" -}}
{{- eq . "router" | ternary "kvrelay_router" "kvrelay_worker" -}}
{{- end -}}

{{/* Ranks of each worker of a role: its tensor parallel degree times its stages. Argument: {root, values}. */}}
{{- define "kvrelay.allRanks" -}}
{{- $engine := mergeOverwrite (deepCopy .root.Values.engine) (default (dict) .values.engine) -}}
{{- mul (default 1 $engine.tensor_parallel | int) (default 1 $engine.pipeline_parallel | int) -}}
{{- end -}}

{{/* Pods of each worker of a role. Argument: {root, values}. */}}
{{- define "kvrelay.hosts" -}}
{{- $engine := mergeOverwrite (deepCopy .root.Values.engine) (default (dict) .values.engine) -}}
{{- default 1 $engine.hosts | int -}}
{{- end -}}

{{/* Ranks of a worker in each of its pods. Argument: {root, values}. */}}
{{- define "kvrelay.ranks" -}}
{{- max 1 (div (include "kvrelay.allRanks" . | int) (include "kvrelay.hosts" . | int)) -}}
{{- end -}}

{{/* Workers in each pod of a role. Argument: {root, values}. */}}
{{- define "kvrelay.workersPerPod" -}}
{{- default (max 1 (div (int .values.gpus) (include "kvrelay.ranks" . | int))) (int .values.workersPerPod) -}}
{{- end -}}

{{/* Part of an amount for each worker of a pod, with four decimals, as Ray counts. Argument: {amount, root, values}. */}}
{{- define "kvrelay.perWorker" -}}
{{- $part := floor (divf (mulf (float64 .amount) 10000) (include "kvrelay.workersPerPod" . | float64)) -}}
{{- divf $part 10000 -}}
{{- end -}}

{{/* Roles whose workers this release runs, as a JSON list. */}}
{{- define "kvrelay.roles" -}}
{{- $roles := list -}}
{{- range $role := list "prefill" "decode" "colocated" -}}
{{- if gt (int (index $.Values $role).replicas) 0 -}}
{{- $roles = append $roles $role -}}
{{- end -}}
{{- end -}}
{{- toJson $roles -}}
{{- end -}}

{{/* Checks that need two values, which the schema can't express. */}}
{{- define "kvrelay.validate" -}}
{{- range $key := list "grpcPort" "httpPort" -}}
{{- $port := int (index $.Values.router $key) -}}
{{- if or (eq $port 8080) (eq $port 52365) (and (ge $port 10002) (le $port 19999)) -}}
{{- fail (printf "router.%s is %d; allowed: not 8080, 52365 or 10002 to 19999, where Ray listens" $key $port) -}}
{{- end -}}
{{- end -}}
{{- if eq (int .Values.router.grpcPort) (int .Values.router.httpPort) -}}
{{- fail (printf "router.httpPort is %d; allowed: another one than router.grpcPort" (int .Values.router.httpPort)) -}}
{{- end -}}
{{- if eq (int .Values.colocated.replicas) 0 -}}
{{- range $role := list "prefill" "decode" -}}
{{- if eq (int (index $.Values $role).replicas) 0 -}}
{{- fail (printf "%s.replicas is 0; allowed: at least 1, unless colocated.replicas is" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := fromJsonArray (include "kvrelay.roles" .) -}}
{{- $values := index $.Values $role -}}
{{- $bounds := include "kvrelay.bounds" (dict "root" $ "values" $values) | fromJson -}}
{{- if lt (int $bounds.max) (int $values.replicas) -}}
{{- fail (printf "%s.maxReplicas is %d; allowed: at least %s.replicas (%d)" $role (int $bounds.max) $role (int $values.replicas)) -}}
{{- end -}}
{{- if gt (int $bounds.min) (int $values.replicas) -}}
{{- fail (printf "%s.minReplicas is %d; allowed: at most %s.replicas (%d)" $role (int $bounds.min) $role (int $values.replicas)) -}}
{{- end -}}
{{- end -}}
{{- range $role := fromJsonArray (include "kvrelay.roles" .) -}}
{{- $values := index $.Values $role -}}
{{- $argument := dict "root" $ "values" $values -}}
{{- $ranks := include "kvrelay.ranks" $argument | int -}}
{{- $workers := include "kvrelay.workersPerPod" $argument | int -}}
{{- $gpus := int $values.gpus -}}
{{- $all := include "kvrelay.allRanks" $argument | int -}}
{{- $hosts := include "kvrelay.hosts" $argument | int -}}
{{- if mod $all $hosts -}}
{{- fail (printf "%s.engine.hosts is %d; allowed: a divisor of %d, the worker's ranks (tensor_parallel times pipeline_parallel)" $role $hosts $all) -}}
{{- end -}}
{{- if and (gt $hosts 1) (or $.Values.security.tls.enabled (ne (default "none" $.Values.transfer.encrypt) "none")) -}}
{{- fail (printf "%s.engine.hosts is %d; allowed: 1 with security.tls or transfer.encrypt, as plans and sums between a worker's pods are neither encrypted nor authenticated" $role $hosts) -}}
{{- end -}}
{{- if and (gt $hosts 1) (gt $workers 1) -}}
{{- fail (printf "%s.workersPerPod is %d (%d GPUs for %d ranks in a pod); allowed: 1, since a worker has %d pods of its own (engine.hosts)" $role $workers $gpus $ranks $hosts) -}}
{{- end -}}
{{- if and (gt $ranks 1) (mod $gpus $ranks) -}}
{{- fail (printf "%s.gpus is %d; allowed: 0, or a multiple of %d: a worker's ranks in a pod (tensor_parallel times pipeline_parallel, divided by hosts) have a GPU each" $role $gpus $ranks) -}}
{{- end -}}
{{- if and (gt $ranks 1) (gt $gpus 0) (ne (mul $workers $ranks) $gpus) -}}
{{- fail (printf "%s.workersPerPod is %d; allowed: 0, or %d: each of a worker's %d ranks computes on a GPU of its own" $role $workers (div $gpus $ranks) $ranks) -}}
{{- end -}}
{{- if lt (mul $workers $ranks) $gpus -}}
{{- fail (printf "%s.workersPerPod is %d; allowed: 0, or at least %s.gpus (%d): a worker computes on one GPU" $role $workers $role $gpus) -}}
{{- end -}}
{{- end -}}
{{- range $role := fromJsonArray (include "kvrelay.roles" .) -}}
{{- $workers := include "kvrelay.workersPerPod" (dict "root" $ "values" (index $.Values $role)) | int -}}
{{- if and $.Values.metrics.workerPort (gt $workers 1) -}}
{{- fail (printf "metrics.workerPort is %d; allowed: 0, since the %d workers of a pod of %s would share it" (int $.Values.metrics.workerPort) $workers $role) -}}
{{- end -}}
{{- end -}}
{{- if lt (float64 .Values.terminationGracePeriodSeconds) (addf .Values.drainSeconds 15) -}}
{{- fail (printf "terminationGracePeriodSeconds is %v; allowed: at least drainSeconds (%v) and 15 more, which members and Ray need to stop" .Values.terminationGracePeriodSeconds .Values.drainSeconds) -}}
{{- end -}}
{{- if and .Values.gcsFaultTolerance.enabled (not .Values.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress is empty; allowed: host:port, as gcsFaultTolerance.enabled is true" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs is empty; allowed: a Gateway, as gateway.enabled is true" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) (not .Values.ingress.grpcHosts) -}}
{{- fail "ingress.hosts is empty; allowed: a host name there or in ingress.grpcHosts, as ingress.enabled is true" -}}
{{- end -}}
{{- if .Values.security.tls.enabled -}}
{{- range $part, $secret := .Values.security.tls.secrets -}}
{{- if not $secret -}}
{{- fail (printf "security.tls.secrets.%s is empty; allowed: a Secret, as security.tls.enabled is true" $part) -}}
{{- end -}}
{{- end -}}
{{- else if eq (default "none" .Values.transfer.encrypt) "full" -}}
{{- fail "transfer.encrypt is full; allowed: with security.tls.enabled only, whose certificates it uses" -}}
{{- end -}}
{{- $volume := .Values.model.volume -}}
{{- if and (hasPrefix (printf "%s/" $volume.mountPath) (printf "%s/" .Values.model.path)) (not $volume.source) -}}
{{- fail (printf "model.path is %q, below model.volume.mountPath, but model.volume.source is empty" .Values.model.path) -}}
{{- end -}}
{{- if and .Values.rdma.enabled .Values.rdma.hostNetwork .Values.networkPolicy.enabled (not .Values.networkPolicy.nodeCidrs) -}}
{{- fail "networkPolicy.nodeCidrs is empty; with rdma.hostNetwork the workers call from the nodes' addresses, which the policy must allow. Set it, or networkPolicy.enabled=false" -}}
{{- end -}}
{{- end -}}

{{/*
The section `scaling` as JSON. With the autoscaler, workers are added and removed within the bounds of its groups, unless
the section has bounds of its own.
*/}}
{{- define "kvrelay.scaling" -}}
{{- $scaling := deepCopy .Values.scaling -}}
{{- if and .Values.autoscaling.enabled (default false $scaling.enabled) -}}
{{- $least := 0 -}}
{{- $most := 0 -}}
{{- range $role := list "prefill" "decode" -}}
{{- $values := index $.Values $role -}}
{{- $bounds := include "kvrelay.bounds" (dict "root" $ "values" $values) | fromJson -}}
{{- $workers := include "kvrelay.workersPerPod" (dict "root" $ "values" $values) | int -}}
{{- $least = add $least (mul $bounds.min $workers) -}}
{{- $most = add $most (mul $bounds.max $workers) -}}
{{- end -}}
{{- $scaling = merge $scaling (dict "min_workers" (max 2 $least | int) "max_workers" ($most | int)) -}}
{{- end -}}
{{- toJson $scaling -}}
{{- end -}}

{{/* {min, max} of a role's group as JSON. Argument: {root, values}. */}}
{{- define "kvrelay.bounds" -}}
{{- $min := .values.replicas -}}
{{- $max := .values.replicas -}}
{{- if .root.Values.autoscaling.enabled -}}
{{- if hasKey .values "minReplicas" }}{{ $min = .values.minReplicas }}{{ end -}}
{{- if hasKey .values "maxReplicas" }}{{ $max = .values.maxReplicas }}{{ end -}}
{{- end -}}
{{- dict "min" (int $min) "max" (int $max) | toJson -}}
{{- end -}}
