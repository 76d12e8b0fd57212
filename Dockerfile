# The wheel of this checkout with everything that it needs on an NVIDIA GPU.
#   docker build -t vsa-train .
#   docker run --rm --gpus all --shm-size 16g --user "$(id -u):$(id -g)" -v "$PWD:/work" vsa-train train experiment=quickstart
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS python
# Triton compiles the launchers of its kernels with gcc and Python's headers
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/vsa \
    && /opt/vsa/bin/pip install --no-cache-dir uv==0.13.9
ENV VIRTUAL_ENV=/opt/vsa PATH=/opt/vsa/bin:$PATH

FROM python AS wheel
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.py ./
COPY configs configs
COPY kernels kernels
COPY vsa vsa
RUN uv build --wheel --out-dir /dist

FROM python
COPY --from=wheel /dist /dist
# the newest pair that pyproject.toml admits and the tests ran with
RUN uv pip install --no-cache torch==2.13.0 triton==3.7.1 "$(echo /dist/*.whl)[wan,lora]"
# caches and the name in cache folders, for any user
ENV HOME=/tmp USER=vsa
WORKDIR /work
ENTRYPOINT ["vsa"]
CMD ["--help"]
