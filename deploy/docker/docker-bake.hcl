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

group "default" {
  targets = ["router", "cpu", "cuda"]
}

target "image" {
  dockerfile = "deploy/docker/Dockerfile"
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
