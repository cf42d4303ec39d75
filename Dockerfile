# One file, two images, each with or without Ray. `cuda` builds on the public vLLM image, `cpu` on
# any Python 3.11.
#
#   docker buildx bake -f docker/build.hcl cuda         (needs the network for its base image)
#   docker/wheels.sh && docker buildx bake -f docker/build.hcl cpu
#
# No RUN step has a network. The order of layers is the order of change: packages, kernels, plugin,
# programs, label; an ARG stands below the steps that do not use it, or its value would redo them.

ARG BASE_IMAGE=vllm/vllm-openai:v0.33.0
ARG CPU_BASE_IMAGE=python:3.11-slim
ARG RAY_ON=cuda

# Compiles the kernels for every supported architecture against the base's own torch.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS kernels
ARG RELEASE=0
ARG BASE_DIGEST=
ARG KERNEL_JOBS=4
RUN --network=none test "${RELEASE}" = 0 || test -n "${BASE_DIGEST}" \
    || { echo 'a release needs the base digest: python3 docker/pin.py' >&2; exit 1; }
COPY overlay/glm_exl3 /src/glm_exl3
RUN --network=none PYTHONPATH=/src python3 -c "from pathlib import Path; from glm_exl3.ops import ext; \
    ext.build(Path('/out') / ext.LIBRARY_NAME, jobs=${KERNEL_JOBS})"

# nvcc and ninja of the base stay: FlashInfer and TileLang compile for SM12x at the first start.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS cuda
COPY pyproject.toml README.md /opt/glm-exl3/source/
COPY overlay /opt/glm-exl3/source/overlay
COPY --from=kernels /out/ /opt/glm-exl3/source/overlay/glm_exl3/ops/
# Reads steering vectors; vLLM's image comes without it.
ADD --checksum=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd \
    https://files.pythonhosted.org/packages/b3/bb/d71d6da82763528c2c2ed6b59a9d6142c6595545a4c448e2085d155e88c2/gguf-0.19.0-py3-none-any.whl \
    /opt/glm-exl3/wheels/
RUN --network=none python3 -m pip install --no-cache-dir --no-deps --no-index \
    --no-build-isolation /opt/glm-exl3/wheels/*.whl -e /opt/glm-exl3/source
COPY docker/*.py /opt/glm-exl3/
ENV XDG_CACHE_HOME=/cache VLLM_CACHE_ROOT=/cache/vllm TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache TILELANG_CACHE_DIR=/cache/tilelang \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
VOLUME /cache
ARG PLUGIN_LABEL=unknown
LABEL io.glm-exl3.plugin="${PLUGIN_LABEL}" org.opencontainers.image.licenses="Apache-2.0"
HEALTHCHECK --interval=10s --timeout=8s --start-period=60m --retries=3 \
    CMD ["python3", "/opt/glm-exl3/healthcheck.py"]
ENTRYPOINT ["python3", "/opt/glm-exl3/entrypoint.py"]

# The wheels come from the named context `wheels` and stay out of the image. One call for each lock:
# pip asks for a hash of everything once it has seen one, and CPU builds of torch have none.
# hadolint ignore=DL3006
FROM ${CPU_BASE_IMAGE} AS cpu
ENV PATH=/opt/venv/bin:$PATH
COPY config/locks/launcher.txt config/locks/cpu.txt config/locks/torch-cpu.txt /opt/glm-exl3/locks/
RUN --network=none --mount=type=bind,from=wheels,target=/wheels python3 -m venv /opt/venv \
    && for lock in launcher cpu torch-cpu; do \
    python3 -m pip install --no-cache-dir --no-deps --no-index --find-links /wheels \
    -r "/opt/glm-exl3/locks/${lock}.txt" || exit 1; done
COPY pyproject.toml README.md /opt/glm-exl3/source/
COPY overlay /opt/glm-exl3/source/overlay
RUN --network=none python3 -m pip install --no-cache-dir --no-deps --no-index \
    --no-build-isolation -e /opt/glm-exl3/source
COPY docker/*.py /opt/glm-exl3/
ENV XDG_CACHE_HOME=/cache VLLM_CACHE_ROOT=/cache/vllm \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
VOLUME /cache
ARG PLUGIN_LABEL=unknown
LABEL io.glm-exl3.plugin="${PLUGIN_LABEL}" org.opencontainers.image.licenses="Apache-2.0"
HEALTHCHECK --interval=10s --timeout=8s --start-period=60m --retries=3 \
    CMD ["python3", "/opt/glm-exl3/healthcheck.py"]
ENTRYPOINT ["python3", "/opt/glm-exl3/entrypoint.py"]

# Either image with Ray, for EXECUTOR=ray. What Ray needs besides msgpack comes with vLLM.
# hadolint ignore=DL3006
FROM ${RAY_ON} AS ray
COPY config/locks/ray.txt /opt/glm-exl3/locks/
RUN --network=none --mount=type=bind,from=ray-wheels,target=/wheels python3 -m pip install \
    --no-cache-dir --no-deps --no-index --find-links /wheels -r /opt/glm-exl3/locks/ray.txt
