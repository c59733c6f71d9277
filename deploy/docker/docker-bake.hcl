# All images, for all platforms that they run on, from the repository's root:
#
#   REGISTRY=registry.example.com docker buildx bake -f deploy/docker/docker-bake.hcl --push --metadata-file images.json
#
# images.json then has the digests (containerimage.digest). A builder for another platform than its own needs a node of that
# platform or emulation: https://docs.docker.com/build/building/multi-platform/

variable "REGISTRY" {
  default = "localhost"
}
variable "VERSION" {
  default = "0.2.0"
}
variable "TORCH_INDEX_URL" {
  default = ""
}
# Base images, better by digest: python:3.11.14-slim-bookworm@sha256:…
variable "PYTHON_IMAGE" {
  default = "python:3.11.14-slim-bookworm"
}
variable "CUDA_IMAGE" {
  default = "nvidia/cuda:13.0.2-base-ubuntu24.04"
}
# SOURCE_DATE_EPOCH=$(git log -1 --format=%ct): the time of the wheel's files, the SBOM and the images.
variable "SOURCE_DATE_EPOCH" {
  default = "315532800"
}

group "default" {
  targets = ["router", "cpu", "cuda"]
}

target "image" {
  dockerfile = "deploy/docker/Dockerfile"
  # Which base images (by digest), arguments and commit made it: docker buildx imagetools inspect IMAGE --format '{{json .Provenance}}'
  attest = ["type=provenance,mode=max"]
  args = {
    PYTHON_IMAGE      = PYTHON_IMAGE
    CUDA_IMAGE        = CUDA_IMAGE
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
}

target "router" {
  inherits  = ["image"]
  target    = "router"
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${REGISTRY}/twinfang-router:${VERSION}"]
}

target "cpu" {
  inherits  = ["image"]
  target    = "cpu"
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${REGISTRY}/twinfang-cpu:${VERSION}"]
  args      = { TORCH_INDEX_URL = TORCH_INDEX_URL }
}

# For the platform that builds it.
target "cuda" {
  inherits = ["image"]
  target   = "cuda"
  tags     = ["${REGISTRY}/twinfang-cuda:${VERSION}"]
}
