# The rollout service. `make images` builds it,
# from build/wheelhouse/rollout, which `make wheelhouse` fills from the locks.
# BASE_IMAGE: any image with Python 3.11 as python3 (and venv);
# torch's own wheels bring CUDA, so the same slim image serves CPUs and GPUs, and one with a CUDA runtime does too.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS packages
RUN python3 -m venv /opt/unimesh
COPY torch/ /wheels/torch/
RUN /opt/unimesh/bin/pip install --no-cache-dir --no-index --no-deps /wheels/torch/*.whl
COPY wheels/ /wheels/
RUN /opt/unimesh/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM ${BASE_IMAGE}
RUN useradd --uid 1000 --create-home unimesh && mkdir -p /state /bodies /models && chown unimesh: /state /bodies
COPY --from=packages /opt/unimesh /opt/unimesh
COPY project/ /tmp/project/
RUN /opt/unimesh/bin/pip install --no-cache-dir --no-index --no-deps /tmp/project/*.whl
ENV PATH=/opt/unimesh/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    UNIMESH_STATE=/state \
    UNIMESH_BODIES=dir:/bodies \
    UNIMESH_ROOTS=/models \
    UNIMESH_HEALTH=127.0.0.1:8090 \
    OMP_WAIT_POLICY=PASSIVE \
    OPENBLAS_NUM_THREADS=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_OFFLINE=1 \
    MALLOC_MMAP_THRESHOLD_=268435456 \
    MALLOC_TRIM_THRESHOLD_=1073741824 \
    MALLOC_TOP_PAD_=67108864
USER unimesh
WORKDIR /state
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import *; build_opener(ProxyHandler({})).open('http://127.0.0.1:8090/healthz', timeout=4)"]
ENTRYPOINT ["unimesh", "serve"]
CMD ["rollout"]
