{{- /* What the values of a side (prefill, decode, router) add to its Deployment. */}}
{{- define "deployment.more" -}}
{{- with (index .root.Values .side).strategy }}
strategy: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "pod.metadata" -}}
{{- $mine := index .root.Values .side -}}
{{- with $mine.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
labels:
  {{- include "labels" . | nindent 2 }}
  {{- with $mine.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* `volumes`: the chart's own. */}}
{{- define "pod.spec" -}}
{{- $mine := index .root.Values .side -}}
terminationGracePeriodSeconds: 120
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "serviceAccountName" "runtimeClassName" "priorityClassName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "initContainers" }}
{{- with index $mine $key }}
{{ dict $key . | toYaml }}
{{- end }}
{{- end }}
{{- include "named" (dict "key" "volumes" "own" .volumes "values" $mine.volumes) }}
{{- end }}

{{- /* `env`, `volumeMounts`: the chart's own. */}}
{{- define "container.more" -}}
{{- $mine := index .root.Values .side -}}
{{- include "named" (dict "key" "env" "own" .env "values" $mine.env) }}
{{- range $key := list "envFrom" "securityContext" }}
{{- with index $mine $key }}
{{ dict $key . | toYaml }}
{{- end }}
{{- end }}
{{- with concat .volumeMounts ($mine.volumeMounts | default list) }}
{{ dict "volumeMounts" . | toYaml }}
{{- end }}
{{- end }}

{{- /* A list of named things: the chart's own, then the values'. A name that both have is the values'. */}}
{{- define "named" -}}
{{- $names := list -}}
{{- range .values }}{{ $names = append $names .name }}{{ end -}}
{{- $all := list -}}
{{- range .own }}{{ if not (has .name $names) }}{{ $all = append $all . }}{{ end }}{{ end -}}
{{- with concat $all (.values | default list) }}
{{ dict $.key . | toYaml }}
{{- end }}
{{- end }}
