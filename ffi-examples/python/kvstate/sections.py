"""What a context is made of: sections and their layers. A description may be used for any number of contexts."""

import ctypes as C

from . import _structs as S
from ._library import i32s, init, lib
from .constants import DEVICE_HOST, SECTION_DSV4, SECTION_RECURRENT, SECTION_SHARED, TYPE_F16


def row_size(ggml_type, n):
    """Bytes of n elements of a ggml type; 0: no whole number of its blocks."""
    return lib.kvs_row_size(ggml_type, n)


class Layer:
    """K and V of a layer; n_embd_v 0: no V; rope: fields of kvs_rope_params as a dict, if kvstate rotates K;
    device: the number of a CUDA device, or DEVICE_HOST."""

    def __init__(self, n_embd_k, n_embd_v, type_k=TYPE_F16, type_v=TYPE_F16, rope=None, device=DEVICE_HOST):
        self.fields = dict(n_embd_k_gqa=n_embd_k, n_embd_v_gqa=n_embd_v, type_k=type_k, type_v=type_v, device=device)
        if rope is not None:
            rope = dict(rope)
            if "freq_factors" in rope:
                rope["freq_factors"] = (C.c_float * len(rope["freq_factors"]))(*rope["freq_factors"])
            self.fields["rope"] = C.pointer(init(S.RopeParams, **rope))


class Kv:
    """An attention cache; fields are those of kvs_kv_params (swa_type, n_swa, v_trans, mirrors, ...)."""

    def __init__(self, kv_size, layers, **fields):
        self.kv_size, self.layers, self.fields = kv_size, list(layers), fields

    def _describe(self, section):
        layers = _structs(S.LayerParams, self.layers)
        section.kv = C.pointer(
            init(S.KvParams, kv_size=self.kv_size, layers=layers, n_layer=len(layers), **self.fields)
        )


class RecurrentLayer:
    """R and S of a layer, None: the layer has none, and P beside R; fields: type_r, type_s, device."""

    def __init__(self, n_embd_r=None, n_embd_s=None, n_embd_p=0, **fields):
        self.fields = dict(has_r=n_embd_r is not None, n_embd_r=n_embd_r or 0, has_s=n_embd_s is not None,
                           n_embd_s=n_embd_s or 0, n_embd_p=n_embd_p, **fields)  # fmt: skip


class Recurrent:
    """Recurrent states: every layer of the model, also those without one, and the number of rollback planes."""

    def __init__(self, layers, n_rs_seq=0):
        self.layers, self.n_rs_seq = list(layers), n_rs_seq

    def _describe(self, section):
        section.kind = SECTION_RECURRENT
        layers = _structs(S.RecurrentLayerParams, self.layers)
        section.recurrent = C.pointer(
            init(S.RecurrentParams, layers=layers, n_layer=len(layers), n_rs_seq=self.n_rs_seq)
        )


class Shared:
    """Layers of a draft that read the cells of the target's cache."""

    def _describe(self, section):
        section.kind = SECTION_SHARED


class Dsv4:
    """The compressed half of a DSV4 memory: three dicts of the fields of kvs_dsv4_compressor_params, layers as a list."""

    def __init__(self, csa, hca, lid, n_rs_seq=0, devices=()):
        self.compressors, self.n_rs_seq, self.devices = dict(csa=csa, hca=hca, lid=lid), n_rs_seq, i32s(devices)

    def _describe(self, section):
        section.kind = SECTION_DSV4
        described = {}
        for name, fields in self.compressors.items():
            layers = (C.c_uint32 * len(fields["layers"]))(*fields["layers"])
            fields = dict(fields, layers=layers, n_layer=len(layers))
            described[name] = C.pointer(init(S.Dsv4CompressorParams, **fields))
        devices = dict(devices=self.devices, n_device=len(self.devices)) if len(self.devices) else {}
        section.dsv4 = C.pointer(init(S.Dsv4Params, n_rs_seq=self.n_rs_seq, **devices, **described))


def _structs(struct, described):
    values = (struct * len(described))()
    for i, one in enumerate(described):
        values[i] = init(struct, **one.fields)
    return values
