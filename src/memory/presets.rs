//! The memories of llama.cpp as sections in write order, with indexers on the cells of their attention cache.

use super::SectionParams;

impl SectionParams {
    /// Full attention, then a sliding window (`llama_kv_cache_iswa`).
    #[must_use]
    pub fn iswa(base: impl Into<Self>, swa: impl Into<Self>) -> Vec<Self> {
        vec![base.into(), swa.into()]
    }

    /// Attention and recurrent layers (`llama_memory_hybrid`).
    #[must_use]
    pub fn hybrid(attention: impl Into<Self>, recurrent: impl Into<Self>) -> Vec<Self> {
        vec![attention.into(), recurrent.into()]
    }

    /// An iSWA pair and recurrent layers (`llama_memory_hybrid_iswa`).
    #[must_use]
    pub fn hybrid_iswa(base: impl Into<Self>, swa: impl Into<Self>, recurrent: impl Into<Self>) -> Vec<Self> {
        vec![base.into(), swa.into(), recurrent.into()]
    }

    /// Attention with an indexer, and recurrent layers (`llama_memory_hybrid_idx`).
    #[must_use]
    pub fn hybrid_indexed(
        attention: impl Into<Self>,
        recurrent: impl Into<Self>,
        indexer: impl Into<Self>,
    ) -> Vec<Self> {
        vec![attention.into(), recurrent.into(), indexer.into().on_cells_of(0)]
    }

    /// MLA attention with a lightning indexer (`llama_kv_cache_dsa`).
    #[must_use]
    pub fn dsa(mla: impl Into<Self>, lid: impl Into<Self>) -> Vec<Self> {
        vec![mla.into(), lid.into().on_cells_of(0)]
    }

    /// MLA attention with a lightning indexer, and a sliding window (`llama_kv_cache_dsa_iswa`).
    #[must_use]
    pub fn dsa_iswa(mla: impl Into<Self>, lid: impl Into<Self>, swa: impl Into<Self>) -> Vec<Self> {
        vec![mla.into(), lid.into().on_cells_of(0), swa.into()]
    }

    /// Attention with an indexer that has V (`llama_kv_cache_msa`).
    #[must_use]
    pub fn msa(base: impl Into<Self>, indexer: impl Into<Self>) -> Vec<Self> {
        vec![base.into(), indexer.into().on_cells_of(0)]
    }

    /// A raw iSWA pair, whose full-attention half has no layers, and its compressed half (`llama_kv_cache_dsv4`).
    #[must_use]
    pub fn dsv4(base: impl Into<Self>, swa: impl Into<Self>, compressed: impl Into<Self>) -> Vec<Self> {
        vec![base.into(), swa.into(), compressed.into()]
    }

    fn on_cells_of(mut self, section: usize) -> Self {
        if let Self::Kv { kv, .. } = &mut self {
            kv.mirrors = Some(section);
        }
        self
    }
}
