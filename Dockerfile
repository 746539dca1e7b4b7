# An image for machines with NVIDIA GPUs: leaderless with torch for CUDA, and vLLM in /opt/vllm, an environment of its
# own, since each build of vLLM is made for one version of torch. It has been linted, but not yet built.
#
#   docker build --tag leaderless-gpu .
#   docker run --rm --init --gpus all --shm-size=16g --ulimit memlock=-1 --user "$(id -u):$(id -g)" \
#       --volume "$PWD:/work" leaderless-gpu leaderless train recipes/gsm8k/eight_gpus_vllm.yaml --workers 8
#
# TORCH_INDEX names a package index with torch for another version of CUDA, where the driver is older than PyPI's needs.
# Wheels bring CUDA's libraries, and the container runtime brings the driver, so the base needs neither.
FROM python:3.12-slim-bookworm

# Triton and torch.compile build kernels when a run starts. What Debian has is what its release was tested with.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner 1000 --mode 1777 /work

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

ARG VLLM="vllm>=0.32"
RUN python -m venv /opt/vllm && /opt/vllm/bin/pip install "$VLLM"

# Gigabytes of dependencies are a layer that changes only with pyproject.toml: a package without content needs the same.
ARG EXTRAS=serve
ARG TORCH_INDEX=
WORKDIR /opt/leaderless
COPY pyproject.toml ./
RUN mkdir -p src/leaderless recipes \
    && touch README.md LICENSE src/leaderless/__init__.py recipes/empty \
    && python -m venv .venv \
    && .venv/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[$EXTRAS]" \
    && rm -r src recipes README.md LICENSE
COPY README.md LICENSE ./
COPY recipes recipes
COPY src src
RUN .venv/bin/pip install --no-deps --force-reinstall .

# Not root, but any user: --user names the owner of the folder that is mounted. Caches go there, too, and torch asks for a
# name, which a user that is not in /etc/passwd has only here.
ENV PATH=/opt/leaderless/.venv/bin:$PATH \
    HOME=/work \
    LOGNAME=trainer
USER 1000
WORKDIR /work
CMD ["leaderless", "--help"]
