"""Set-up that all tests share."""

import jax

# Before any test makes a backend: enough CPU devices for the tests of sharding.
jax.config.update("jax_num_cpu_devices", 8)
