# docker buildx bake -f docker/build.hcl [cuda|cpu|cuda-ray|cpu-ray|release]      docs/nodes.md tells more.

variable "BASE_IMAGE" { default = "vllm/vllm-openai:v0.33.0" }
variable "BASE_DIGEST" { default = "" }
variable "CPU_BASE_IMAGE" { default = "python:3.11-slim" }
variable "PLUGIN_LABEL" { default = "unknown" }
variable "IMAGE" { default = "glm-exl3" }
variable "WHEELS" { default = ".cache/wheels" }
variable "RAY_WHEELS" { default = ".cache/wheels-ray" }

group "default" { targets = ["cuda"] }
group "release" { targets = ["cuda-release"] }

target "base" {
  context    = "."
  dockerfile = "Dockerfile"
  args       = { PLUGIN_LABEL = PLUGIN_LABEL }
}

target "cuda" {
  inherits  = ["base"]
  target    = "cuda"
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${IMAGE}:cuda"]
  args = {
    BASE_IMAGE  = equal(BASE_DIGEST, "") ? BASE_IMAGE : "${BASE_IMAGE}@${BASE_DIGEST}"
    BASE_DIGEST = BASE_DIGEST
  }
}

target "cuda-release" {
  inherits = ["cuda"]
  args     = { RELEASE = "1" }
}

target "cpu" {
  inherits = ["base"]
  target   = "cpu"
  tags     = ["${IMAGE}:cpu"]
  args     = { CPU_BASE_IMAGE = CPU_BASE_IMAGE }
  contexts = { wheels = WHEELS }
}

# The same images with Ray in them, for EXECUTOR=ray.
target "cuda-ray" {
  inherits = ["cuda"]
  target   = "ray"
  tags     = ["${IMAGE}:cuda-ray"]
  args     = { RAY_ON = "cuda" }
  contexts = { ray-wheels = RAY_WHEELS }
}

target "cpu-ray" {
  inherits = ["cpu"]
  target   = "ray"
  tags     = ["${IMAGE}:cpu-ray"]
  args     = { RAY_ON = "cpu" }
  contexts = { ray-wheels = RAY_WHEELS }
}
