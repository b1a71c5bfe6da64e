"""The rate of large float32 matrix products on one CPU device, as JSON on standard output."""

import json
import time

import jax
import jax.numpy as jnp

SIZE = 2048
PRODUCTS = 10
REPEATS = 5


def main() -> None:
    multiply = jax.jit(jnp.matmul)
    matrix = jnp.ones((SIZE, SIZE), jnp.float32)
    multiply(matrix, matrix).block_until_ready()
    wall_s, cpu_s = [], []
    for _ in range(REPEATS):
        start = time.perf_counter(), time.process_time()
        for _ in range(PRODUCTS):
            multiply(matrix, matrix).block_until_ready()
        wall_s.append(time.perf_counter() - start[0])
        cpu_s.append(time.process_time() - start[1])
    flops = 2.0 * SIZE**3 * PRODUCTS
    rates = {"flops_per_s": flops / min(wall_s), "flops_per_cpu_s": flops / min(cpu_s)}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
