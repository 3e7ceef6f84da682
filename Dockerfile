# shardwise with the versions of constraints.txt, on a machine with NVIDIA GPUs and a driver of 580 or later.
#   docker build --tag trainer .
#   docker run --gpus all --network none --shm-size 16g --volume "$PWD:/work" trainer shardwise train run.yaml --nproc 8
# Processes of one machine meet in a file and listen on loopback alone, so they need no network. No port is exposed.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}

# gcc and Python's headers: Triton compiles what starts its kernels. The base's packages are pinned by its tag.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/shardwise
ENV PATH=/opt/shardwise/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# torch first and by its exact version, as in the Makefile; what changes most often comes last.
WORKDIR /opt/shardwise/source
COPY constraints.txt ./
RUN pip install --constraint constraints.txt "torch==$(sed -n 's/^torch==//p' constraints.txt)"
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
COPY src src
# The groups of pyproject.toml that are installed.
ARG EXTRAS=gpu,data,report
RUN pip install --constraint constraints.txt ".[${EXTRAS}]"

# No user of the host has this number, and /work is what it may write; --user and --volume replace both.
# SkyPilot installs packages in a container, and needs an image that was built with --build-arg RUN_AS=root.
ARG RUN_AS=10001
RUN useradd --uid 10001 --create-home shardwise && install --directory --owner shardwise /work
USER ${RUN_AS}
WORKDIR /work
CMD ["shardwise", "--help"]
