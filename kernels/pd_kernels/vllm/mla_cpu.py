# SPDX-License-Identifier: Apache-2.0
"""Replaces CPU_MLA: decodes with the reference in torch."""

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from pd_kernels.vllm.mla_backend import MlaBuilder, MlaImpl


class CpuMla(CPUMLABackend):
    """CPU_MLA with our decodes."""

    @staticmethod
    def get_impl_cls() -> type["CpuMlaImpl"]:
        return CpuMlaImpl

    @staticmethod
    def get_builder_cls() -> type[MlaBuilder]:
        return MlaBuilder


class CpuMlaImpl(MlaImpl, CPUMLAImpl):
    """A layer whose cache and prefills are CPU_MLA's."""
