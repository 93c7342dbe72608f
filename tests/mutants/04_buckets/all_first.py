# expects: launch inside the loop over the gradients
import torch


def all_reduce_in_buckets(gradients, limit, group):
    launched, bucket = [], []
    for gradient in list(gradients):
        if bucket and sum(one.nbytes for one in bucket) + gradient.nbytes > limit:
            launched.append(launch(bucket, group))
            bucket = []
        bucket.append(gradient)
    launched.append(launch(bucket, group))
    return [mean for bucket, pending in launched for mean in means(bucket, pending.wait() / group.size)]


def launch(bucket, group):
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    return bucket, group.all_reduce(flat, async_op=True)


def means(bucket, flat):
    parts = flat.split([gradient.numel() for gradient in bucket])
    return [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
