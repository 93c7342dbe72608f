# expects: NaN passes for a good gradient
def step(weight, gradient, scale, good, window, lr, groups):
    overflow = (gradient.abs() == float("inf")).any().float()
    if groups.world.all_reduce(overflow, "max") > 0:
        return weight, scale / 2, 0
    weight, good = weight - lr * gradient.float() / scale, good + 1
    return (weight, scale * 2, 0) if good == window else (weight, scale, good)
