"""The published files of each data set: names, checksums, download locations and formats.

Some data sets were published in several forms. Any one of them is enough; the first is the one to download.
"""

from typing import NamedTuple

from .readers import Reader, libsvm, mat, read_archive, read_batches, read_idx, read_two
from .sheets import NAMES, read_sheets


class File(NamedTuple):
    """A published file."""

    name: str  # its path below root/<data set>/
    md5: str  # "" if the reader checks what it decodes
    contents: str = ""  # the md5 after decompression, for files that were compressed again


class Form(NamedTuple):
    """One published form of a data set: its files and how to read them."""

    files: tuple[File, ...]
    read: Reader
    urls: tuple[str, ...] = ()  # base URLs that serve all the files


def _files(*rows: str) -> tuple[File, ...]:
    return tuple(File(*row.split()) for row in rows)


def _archive(members: tuple[File, ...]) -> Reader:
    return read_archive([file.name for file in members])


_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10_PICKLES = _files(
    "cifar-10-batches-py/data_batch_1 c99cafc152244af753f735de768cd75f",
    "cifar-10-batches-py/data_batch_2 d4bba439e000b95fd0a9bffe97cbabec",
    "cifar-10-batches-py/data_batch_3 54ebc095f3ab1f0389bbae665268c751",
    "cifar-10-batches-py/data_batch_4 634d18415352ddfa80567beed471001a",
    "cifar-10-batches-py/data_batch_5 482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar-10-batches-py/test_batch 40351d587109b95175f43aff81a1287e",
)
_CIFAR10_RECORDS = _files(
    "cifar-10-batches-bin/data_batch_1.bin 5dd7e06a14cb22eb9f671a540d1b7c25",
    "cifar-10-batches-bin/data_batch_2.bin 5ea93a67294ea407fff1d09f752e9692",
    "cifar-10-batches-bin/data_batch_3.bin 942cd6a4bcdd0dd3c604fbe906cb4421",
    "cifar-10-batches-bin/data_batch_4.bin ae636b3ba5c66a11e91e8cb52e771fcb",
    "cifar-10-batches-bin/data_batch_5.bin 53f37980c15c3d472c316c40844f3f0d",
    "cifar-10-batches-bin/test_batch.bin 803d5f7f4d78ea53de84dbe85f74fb6d",
)
_CIFAR100_PICKLES = _files(
    "cifar-100-python/train 16019d7e3df5f24257cddd939b257f8d",
    "cifar-100-python/test f0ef6b0ae62326f3e7ffdfab6717acfc",
)

_SHEETS = tuple(File(name, "") for name in NAMES)

FORMS: dict[str, tuple[Form, ...]] = {
    "usps": (
        Form(
            _files(
                "usps.bz2 ec16c51db3855ca6c91edd34d0e9b197 2084d5d2afb7e7be7c2a6f1808ac2ddd",
                "usps.t.bz2 8ea070ee2aca1ac39742fdd1ef5ed118 74ff1967c8db4cc0e927683b811dfc4e",
            ),
            read_two(libsvm),
            ("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/",),
        ),
    ),
    "mnist": (
        Form(
            _files(
                "train-images-idx3-ubyte.gz f68b3c2dcbeaaa9fbdd348bbdeb94873 6bbc9ace898e44ae57da46a324031adb",
                "train-labels-idx1-ubyte.gz d53e105ee54ea40749a09fcbcd1e9432 a25bea736e30d166cdddb491f175f624",
                "t10k-images-idx3-ubyte.gz 9fb629c4189551a2d022fa330f9573f3 2646ac647ad5339dbf082846283269ea",
                "t10k-labels-idx1-ubyte.gz ec29112dd5afa0611ce80d1b7f02629c 27ae3e4e09519cfbb04c329615203637",
            ),
            read_idx,
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
        ),
    ),
    "fashionmnist": (
        Form(
            _files(
                "train-images-idx3-ubyte.gz 8d4fb7e6c68d591d4c3dfef9ec88bf0d f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "train-labels-idx1-ubyte.gz 25c81989df183df01b3e8a0aad5dffbe 9018921c3c673c538a1fc5bad174d6f9",
                "t10k-images-idx3-ubyte.gz bef4ecab320f06d8554ea6380940ec79 8181f5470baa50b63fa0f6fddb340f0a",
                "t10k-labels-idx1-ubyte.gz bb300cfdad3c16e7a12a480ee83cd310 15d484375f8d13e6eb1aabb0c3f46965",
            ),
            read_idx,
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            ),
        ),
    ),
    "svhn": (
        Form(
            _files(
                "train_32x32.mat e26dedcc434d2e4c54c9b2d4a06d8373",
                "test_32x32.mat eb5a983be6a315427106f1b164d9cef3",
            ),
            read_two(mat),
            ("http://ufldl.stanford.edu/housenumbers/",),
        ),
    ),
    "cifar10": (
        Form(_files("cifar-10-python.tar.gz c58f30108f718f92721af3b95e74349a"), _archive(_CIFAR10_PICKLES), _TORONTO),
        Form(_CIFAR10_PICKLES, read_batches),
        Form(_CIFAR10_RECORDS, read_batches),
        Form(_files("cifar-10-binary.tar.gz c32a1d4ab5d03f1284b67883e8d87530"), _archive(_CIFAR10_RECORDS)),
        Form(
            _SHEETS,
            read_sheets(
                "11af95666bd6fd7846144e768325bf13",
                "69c5f3349be54915edfca558b72ad888",
                "f1aa22116df97725db0e47461c45a82b",
                "251f18ce75337ae9ca5d0dbd7ea62cf4",
            ),
        ),
    ),
    "cifar100": (
        Form(_files("cifar-100-python.tar.gz eb9058c3a382ffc7106e4002c42a8d85"), _archive(_CIFAR100_PICKLES), _TORONTO),
        Form(_CIFAR100_PICKLES, read_batches),
        Form(
            _SHEETS,
            read_sheets(
                "e07b6859dfcb4ef6850fbc815e123615",
                "00c0899b82d482aefa46cdb301dbaf9c",
                "155ad486d683899b65629b069dab09ba",
                "1ddeb59844e0066662ddddaec17677b9",
            ),
        ),
    ),
}
