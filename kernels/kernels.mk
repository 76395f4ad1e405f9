# The CUDA kernels for Volta, and the audit of their machine code.
NVCC ?= /usr/bin/nvcc
UPDATE ?= 0
VSIM ?= ../shared/vsim
CASES ?=
SM70_BUILD := kernels/build-sm70

.PHONY: kernels
kernels: $(STAMP) ## build libnvfp4_sm70.so with nvcc 11.8
	@$(NVCC) --version 2>/dev/null | grep -q 'release 11\.8' || { \
	  echo "kernels: no nvcc 11.8 at $(NVCC); on Debian 12 install nvidia-cuda-toolkit (non-free) and g++-11" >&2; exit 1; }
	$(BIN)/cmake -S kernels -B $(SM70_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DNVFP4_CUDA=ON -DNVFP4_CUDART_SHARED=ON -DNVFP4_NVCC=$(NVCC) -DNVFP4_LIBRARY_DIR=$(CURDIR)/appliance/lib \
	  -DCMAKE_BUILD_TYPE=Release --log-level=NOTICE
	$(BIN)/cmake --build $(SM70_BUILD) --target nvfp4_sm70 --parallel $(JOBS)

.PHONY: kernels-audit
kernels-audit: kernels ## check the machine code against its design; UPDATE=1 writes the golden table
	$(BIN)/python kernels/audit/audit.py appliance/lib/libnvfp4_sm70.so --sources kernels/src --nvcc $(NVCC) \
	  --golden tests/golden/kernels/audit.txt $(if $(filter 1,$(UPDATE)),--update)

.PHONY: kernels-bench-vsim
kernels-bench-vsim: kernels ## time the machine code on the modelled V100 (CASES=matmul:1x5120x8704,moe:8)
	@test -x $(VSIM)/run || { echo 'error[NO_MODEL] VSIM: must be the folder of the modelled V100, got $(VSIM); name it, as in make kernels-bench-vsim VSIM=FOLDER.' >&2; exit 2; }
	$(BIN)/cmake --build $(SM70_BUILD) --target nvfp4_sm70_shared --parallel $(JOBS)
	$(BIN)/python kernels/bench/bench_vsim.py $(SM70_BUILD)/libnvfp4_sm70_shared.so --vsim $(VSIM) \
	  $(if $(CASES),--only $(CASES),--json kernels/bench/results/vsim-v100.json)
