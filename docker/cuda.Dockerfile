# The check of cuDNN and native on an NVIDIA GPU; the host has the driver and NVIDIA's container toolkit:
#   docker build -f docker/cuda.Dockerfile -t pybnorm-cuda . && docker run --rm --gpus all pybnorm-cuda
FROM python:3.13-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip install --no-cache-dir '/source[cuda13,report]'
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /reports
ENTRYPOINT ["pybnorm"]
CMD ["check", "--backend", "cudnn", "--backend", "native_cuda"]
