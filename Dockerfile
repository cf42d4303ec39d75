# One file, two images. `cuda` builds on the public vLLM image, `cpu` on any Python 3.11.
#
#   docker buildx bake -f docker/build.hcl cuda         (needs the network for its base image)
#   docker buildx bake -f docker/build.hcl cpu          (wheels in the named context `wheels`)
#
# No RUN step reaches the network. The order of layers is the order of change: packages, kernels,
# plugin, programs.

ARG BASE_IMAGE=vllm/vllm-openai:v0.33.0
ARG CPU_BASE_IMAGE=python:3.11-slim

# Compiles the kernels for every supported architecture against the base's own torch.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS kernels
ARG RELEASE=0
ARG BASE_DIGEST=
ARG KERNEL_JOBS=4
RUN test "${RELEASE}" = 0 || test -n "${BASE_DIGEST}" \
    || { echo 'a release needs the base digest: python3 docker/pin.py' >&2; exit 1; }
COPY overlay/glm_exl3 /src/glm_exl3
RUN PYTHONPATH=/src python3 -c "from pathlib import Path; from glm_exl3.ops import ext; \
    ext.build(Path('/out') / ext.LIBRARY_NAME, jobs=${KERNEL_JOBS})"

# nvcc and ninja of the base stay: FlashInfer and TileLang compile for SM12x at the first start.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS cuda
ARG PLUGIN_LABEL=unknown
COPY pyproject.toml README.md /opt/glm-exl3/source/
COPY overlay /opt/glm-exl3/source/overlay
COPY --from=kernels /out/ /opt/glm-exl3/source/overlay/glm_exl3/ops/
RUN python3 -m pip install --no-cache-dir --no-deps --no-index --no-build-isolation \
    -e /opt/glm-exl3/source
COPY docker/entrypoint.py docker/hello.py docker/healthcheck.py /opt/glm-exl3/
ENV XDG_CACHE_HOME=/cache VLLM_CACHE_ROOT=/cache/vllm TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache TILELANG_CACHE_DIR=/cache/tilelang \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
VOLUME /cache
LABEL io.glm-exl3.plugin="${PLUGIN_LABEL}" org.opencontainers.image.licenses="Apache-2.0"
HEALTHCHECK --interval=10s --timeout=8s --start-period=60m --retries=3 \
    CMD ["python3", "/opt/glm-exl3/healthcheck.py"]
ENTRYPOINT ["python3", "/opt/glm-exl3/entrypoint.py"]

# hadolint ignore=DL3006
FROM ${CPU_BASE_IMAGE} AS cpu
ARG PLUGIN_LABEL=unknown
COPY config/locks/cpu.txt config/locks/torch-cpu.txt /opt/glm-exl3/locks/
RUN --mount=type=bind,from=wheels,target=/wheels python3 -m pip install --no-cache-dir --no-deps \
    --no-index --find-links /wheels -r /opt/glm-exl3/locks/cpu.txt \
    -r /opt/glm-exl3/locks/torch-cpu.txt setuptools
COPY pyproject.toml README.md /opt/glm-exl3/source/
COPY overlay /opt/glm-exl3/source/overlay
RUN python3 -m pip install --no-cache-dir --no-deps --no-index --no-build-isolation \
    -e /opt/glm-exl3/source
COPY docker/entrypoint.py docker/hello.py docker/healthcheck.py /opt/glm-exl3/
ENV XDG_CACHE_HOME=/cache VLLM_CACHE_ROOT=/cache/vllm \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
VOLUME /cache
LABEL io.glm-exl3.plugin="${PLUGIN_LABEL}" org.opencontainers.image.licenses="Apache-2.0"
HEALTHCHECK --interval=10s --timeout=8s --start-period=60m --retries=3 \
    CMD ["python3", "/opt/glm-exl3/healthcheck.py"]
ENTRYPOINT ["python3", "/opt/glm-exl3/entrypoint.py"]
