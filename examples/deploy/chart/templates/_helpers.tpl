{{- define "labels" -}}
app.kubernetes.io/name: pd-connector
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .side }}
{{- end }}

{{- /* The ports of one kind that a prefill pod's ranks use: "7100", or "7100-7107". */}}
{{- define "ports" -}}
{{- $last := sub (add .first .ranks) 1 -}}
{{- if eq (int .ranks) 1 }}{{ .first }}{{ else }}{{ .first }}-{{ $last }}{{ end -}}
{{- end }}

{{- define "engine" -}}
{{- $root := .root -}}
{{- $side := .side -}}
{{- $mine := index $root.Values $side -}}
{{- $ranks := $mine.tensorParallelSize -}}
{{- $ports := dict -}}
{{- if eq $side "prefill" -}}
{{- $_ := set $ports "control_port" (include "ports" (dict "first" $root.Values.ports.control "ranks" $ranks)) -}}
{{- $_ := set $ports "data_port" (include "ports" (dict "first" $root.Values.ports.data "ranks" $ranks)) -}}
{{- end -}}
{{- $env := list
  (dict "name" "PD_CONNECTOR_KEY" "valueFrom" (dict "secretKeyRef" (dict "name" $root.Values.keySecret "key" "key")))
  (dict "name" "PD_CONNECTOR_HOST" "valueFrom" (dict "fieldRef" (dict "fieldPath" "status.podIP"))) -}}
{{- $volumes := list (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" $root.Values.sharedMemory)) -}}
{{- $mounts := list (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- with $root.Values.tokenSecret -}}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" . "key" "token"))) -}}
{{- end -}}
{{- $cache := $root.Values.modelCache -}}
{{- if or $cache.claim $cache.hostPath -}}
{{- $env = append $env (dict "name" "HF_HOME" "value" "/model-cache") -}}
{{- $mounts = append $mounts (dict "name" "model-cache" "mountPath" "/model-cache") -}}
{{- $place := dict "hostPath" (dict "path" $cache.hostPath "type" "DirectoryOrCreate") -}}
{{- if $cache.claim -}}{{- $place = dict "persistentVolumeClaim" (dict "claimName" $cache.claim) -}}{{- end -}}
{{- $volumes = append $volumes (merge (dict "name" "model-cache") $place) -}}
{{- end -}}
{{- $role := ternary "kv_producer" "kv_consumer" (eq $side "prefill") -}}
{{- $transfer := dict "kv_connector" "PDConnector" "kv_role" $role "kv_connector_extra_config" (merge (dict) $ports $mine.connector) -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $root.Release.Name }}-{{ $side }}
  labels: {{- include "labels" . | nindent 4 }}
spec:
  {{- if not $root.Values.autoscaling.enabled }}
  replicas: {{ $mine.replicas }}
  {{- end }}
  {{- include "deployment.more" . | nindent 2 }}
  selector:
    matchLabels: {{- include "labels" . | nindent 6 }}
  template:
    metadata: {{- include "pod.metadata" . | nindent 6 }}
    spec:
      {{- include "pod.spec" (merge (dict "volumes" $volumes) .) | nindent 6 }}
      containers:
        - name: engine
          image: {{ $root.Values.image }}
          command: ["vllm", "serve", {{ $root.Values.model | quote }}]
          args:
            - --host=0.0.0.0
            - --port=8000
            - --tensor-parallel-size={{ $ranks }}
            - --kv-transfer-config
            - {{ $transfer | toJson | squote }}
            {{- range $mine.args }}
            - {{ . | quote }}
            {{- end }}
          {{- include "container.more" (merge (dict "env" $env "volumeMounts" $mounts) .) | nindent 10 }}
          ports:
            - {name: http, containerPort: 8000}
            {{- if eq $side "prefill" }}
            {{- range $rank := until (int $ranks) }}
            - {name: control-{{ $rank }}, containerPort: {{ add $root.Values.ports.control $rank }}}
            - {name: data-{{ $rank }}, containerPort: {{ add $root.Values.ports.data $rank }}}
            {{- end }}
            {{- end }}
          # A model may take half an hour to load.
          startupProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 10
            failureThreshold: 180
          livenessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 5
            timeoutSeconds: 5
          resources: {{- mergeOverwrite (dict "limits" (dict "nvidia.com/gpu" ($ranks | toString))) ($mine.resources | default dict) | toYaml | nindent 12 }}
---
# Headless: the router looks up each pod's address.
apiVersion: v1
kind: Service
metadata:
  name: {{ $root.Release.Name }}-{{ $side }}
  labels: {{- include "labels" . | nindent 4 }}
spec:
  clusterIP: None
  selector: {{- include "labels" . | nindent 4 }}
  ports:
    - {name: http, port: 8000, targetPort: http}
{{- end }}

{{- /* What the schema of the values cannot say. */}}
{{- define "check" -}}
{{- $set := dict "prefill" "host|port|tensor-parallel-size|kv-transfer-config" -}}
{{- $_ := set $set "decode" $set.prefill -}}
{{- $_ := set $set "router" (ternary "host|port|roles|max-prefill|max-decode|engine-start-s" "host|port" .Values.autoscaling.enabled) -}}
{{- range $side, $flags := $set -}}
{{- range $arg := (index $.Values $side).args -}}
{{- if regexMatch (printf "^--(%s)([=.]|$)" $flags) $arg -}}
{{- $from := ternary (ternary " (autoscaling)" "" $.Values.autoscaling.enabled) (printf " (%s.tensorParallelSize, %s.connector)" $side $side) (eq $side "router") -}}
{{- fail (printf "%s.args: the chart sets %s itself%s: leave it out" $side $arg $from) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.router.replicas) 1) -}}
{{- $fellows := false -}}
{{- range $arg := .Values.router.args }}{{ if regexMatch "^--fellows([=.]|$)" $arg }}{{ $fellows = true }}{{ end }}{{ end -}}
{{- if not $fellows -}}
{{- fail (printf "router.replicas %d with autoscaling: each router would count its own part of the requests only: set it to 1, or give router.args --exchange and --fellows" (int .Values.router.replicas)) -}}
{{- end -}}
{{- end -}}
{{- range $side := list "prefill" "decode" "router" -}}
{{- $mine := index $.Values $side -}}
{{- range $label, $_ := $mine.podLabels -}}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "%s.podLabels: the chart finds its pods by %s: leave it out" $side $label) -}}
{{- end -}}
{{- end -}}
{{- $volumes := ternary (list) (list "shm" "model-cache") (eq $side "router") -}}
{{- range $mine.volumes }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- range $mine.volumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s.volumeMounts: no volume has the name %s: add it to %s.volumes" $side .name $side) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.modelCache.claim .Values.modelCache.hostPath -}}
{{- fail (printf "modelCache: claim %s and hostPath %s: leave one out" .Values.modelCache.claim .Values.modelCache.hostPath) -}}
{{- end -}}
{{- range $name := list "control_port" "data_port" -}}
{{- if hasKey $.Values.prefill.connector $name -}}
{{- fail (printf "prefill.connector.%s: the chart sets it, and opens it in the NetworkPolicy: set ports.%s" $name (trimSuffix "_port" $name)) -}}
{{- end -}}
{{- end -}}
{{- range $side := list "prefill" "decode" -}}
{{- if hasKey (index $.Values $side).connector "key" -}}
{{- fail (printf "%s.connector.key: engines log their arguments: put the key into the secret %s" $side $.Values.keySecret) -}}
{{- end -}}
{{- end -}}
{{- $control := int .Values.ports.control -}}
{{- $data := int .Values.ports.data -}}
{{- $ranks := int .Values.prefill.tensorParallelSize -}}
{{- if and (lt $control (add $data $ranks | int)) (lt $data (add $control $ranks | int)) -}}
{{- fail (printf "ports.control %d, ports.data %d: %d ranks use as many ports from each on, and these overlap: set them further apart" $control $data $ranks) -}}
{{- end -}}
{{- if gt (sub (add (max $control $data) $ranks) 1 | int) 65535 -}}
{{- fail (printf "ports.control %d, ports.data %d: the last of %d ranks has a port above 65535" $control $data $ranks) -}}
{{- end -}}
{{- range $side := list "prefill" "decode" -}}
{{- $mine := index $.Values.autoscaling $side -}}
{{- if gt (int $mine.minReplicas) (int $mine.maxReplicas) -}}
{{- fail (printf "autoscaling.%s: minReplicas %d is above maxReplicas %d" $side (int $mine.minReplicas) (int $mine.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end }}
