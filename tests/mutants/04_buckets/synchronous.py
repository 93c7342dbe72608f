# expects: with async_op=True, backward goes on meanwhile
import torch


def all_reduce_in_buckets(gradients, limit, group):
    means, bucket = [], []
    for gradient in gradients:
        if bucket and sum(one.nbytes for one in bucket) + gradient.nbytes > limit:
            means += average(bucket, group)
            bucket = []
        bucket.append(gradient)
    return means + average(bucket, group)


def average(bucket, group):
    flat = group.all_reduce(torch.cat([gradient.flatten() for gradient in bucket])) / group.size
    parts = flat.split([gradient.numel() for gradient in bucket])
    return [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
