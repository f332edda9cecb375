//! States that llama.cpp wrote, and contexts of the geometry that their sidecars describe.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use kvstate::format::GgmlType;
use kvstate::memory::{
    Dsv4CompressorParams, Dsv4Memory, Dsv4Params, KvParams, LayerParams, LegacyRotation,
    RecurrentLayerParams, RecurrentParams, SectionParams, TensorParams,
};
use kvstate::types::{Pos, SeqId, StateFlags, Swa, SwaType, Token};
use kvstate::{Context, ContextParams};
use serde::Deserialize;

use crate::place;

/// What a sidecar says about a state.
#[derive(Clone, Debug, Deserialize)]
pub struct Sidecar {
    pub arch: String,
    pub memory: String,
    n_embd_k_gqa: Vec<u32>,
    n_embd_v_gqa: Vec<u32>,
    type_k: String,
    type_v: String,
    v_trans: u32,
    n_ctx: u32,
    n_ctx_seq: Option<u32>,
    pub n_seq_max: u32,
    pub kv_unified: bool,
    pub seq_id: SeqId,
    flags: u32,
    pos_min: Pos,
    pos_max: Pos,
    #[serde(default)]
    pub tokens: Vec<Token>,
    restore: Restore,
    pub sections: Vec<Section>,
    state_seq_version: Option<u32>,
    n_rot_true: Option<HashMap<String, [u32; 2]>>,
}

/// What llama.cpp's own `set_data` gave.
#[derive(Clone, Debug, Deserialize)]
pub struct Restore {
    pub set_data: usize,
    pos_min: Option<Pos>,
    pos_max: Option<Pos>,
}

/// A section of the state. A state without cells does not say what its layers are.
#[derive(Clone, Debug, Deserialize)]
pub struct Section {
    pub kind: String,
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub cell_ext: bool,
    #[serde(default)]
    n_swa: u32,
    #[serde(default)]
    swa_type: u32,
    /// Cells of each stream; of a recurrent section, its states.
    #[serde(default)]
    pub cells: Vec<u32>,
    #[serde(default)]
    pub n_layer: usize,
    /// Layer, ggml type and bytes of a row.
    #[serde(default)]
    pub r_layer_type_rowbytes: Vec<(usize, i32, u64)>,
    #[serde(default)]
    pub s_layer_type_rowbytes: Vec<(usize, i32, u64)>,
    /// Layer and bytes of a row.
    pub p_layer_rowbytes: Option<(usize, u64)>,
    /// Of DSV4: number of the layer, and its tensors.
    #[serde(default)]
    pub layers: Vec<Vec<serde_json::Value>>,
    #[serde(default)]
    pub ratio: u32,
    #[serde(default)]
    pub state_size: u32,
    #[serde(default)]
    pub n_embd_state: u32,
    pub v_trans: Option<u32>,
    pub n_rot_k: Option<u32>,
    pub n_rot_v: Option<u32>,
    /// ggml type and bytes of a row, by layer.
    pub k_type_rowbytes: Option<Vec<(i32, u64)>>,
    pub v_type_rowbytes: Option<Vec<(i32, u64)>>,
}

impl Section {
    pub fn is_attention(&self) -> bool {
        self.kind == "attention"
    }

    pub fn is_full_attention(&self) -> bool {
        self.is_attention() && self.swa_type == 0
    }

    /// Bytes that a cell of an attention section takes in a state, without its metadata.
    pub fn cell_bytes(&self) -> u64 {
        let tensors = self.k_type_rowbytes.iter().chain(&self.v_type_rowbytes).flatten();
        tensors.map(|&(_, row_size)| row_size).sum()
    }

    fn is_of_dsv4(&self) -> bool {
        self.kind.starts_with("dsv4_")
    }

    /// The geometry of a recurrent section.
    pub fn recurrent(&self) -> RecurrentParams {
        let mut params = RecurrentParams::default();
        params.layers.resize(self.n_layer, RecurrentLayerParams::default());
        for &(layer, ggml_type, row_size) in &self.r_layer_type_rowbytes {
            params.layers[layer].r = Some(tensor(ggml_type, row_size));
        }
        for &(layer, ggml_type, row_size) in &self.s_layer_type_rowbytes {
            params.layers[layer].s = Some(tensor(ggml_type, row_size));
        }
        if let Some((layer, row_size)) = self.p_layer_rowbytes {
            let r = params.layers[layer].r.expect("a layer with R");
            params.layers[layer].p = Some(tensor(r.ggml_type.as_i32(), row_size).n_embd);
        }
        params
    }
}

fn tensor(number: i32, row_size: u64) -> TensorParams {
    let ggml_type = GgmlType::from_i32(number).unwrap();
    let n_block = u32::try_from(row_size).unwrap() / ggml_type.type_size();
    TensorParams { ggml_type, n_embd: n_block * ggml_type.block_size() }
}

/// One state, with its sidecar.
#[derive(Clone, Debug)]
pub struct Fixture {
    root: PathBuf,
    /// Path of its files below the folder, without extension: the name in messages.
    pub name: String,
    pub sidecar: Sidecar,
    /// The sections of the cache: those of the whole state, where the folder has it.
    cache: Vec<Section>,
}

/// The small part of the fixtures that is kept with the tests.
pub fn repository_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Every fixture there is: `KVSTATE_FIXTURES`, or the folder `shared/fixtures` beside the crate, or else the
/// part that is kept with the tests.
pub fn folder() -> PathBuf {
    if let Some(path) = std::env::var_os("KVSTATE_FIXTURES") {
        return path.into();
    }
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures");
    if shared.is_dir() { shared } else { repository_folder() }
}

/// The fixtures of [`folder`], sorted by name.
pub fn fixtures() -> Vec<Fixture> {
    fixtures_in(&folder())
}

/// The fixtures below `root`, sorted by name.
pub fn fixtures_in(root: &Path) -> Vec<Fixture> {
    let mut found = Vec::new();
    for sub in ["", "v2/", "v3/", "v4_twins/"] {
        let dir = root.join(sub);
        let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.extension().is_some_and(|ext| ext == "json") {
                found.extend(Fixture::open(root, sub, &path));
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(!found.is_empty(), "no fixtures in {}", root.display());
    found
}

/// Files of whole contexts below [`folder`]: each with the fixture of the same context whose sidecar holds its
/// geometry. `suffix` tells the kind: `_whole.ctx` or `_session.bin`.
pub fn whole_contexts(suffix: &str) -> Vec<(PathBuf, Fixture)> {
    let root = folder();
    let all = fixtures();
    let mut found = Vec::new();
    for sub in ["", "v2", "v3", "v4_twins"] {
        for path in fs::read_dir(root.join(sub)).unwrap().map(|entry| entry.unwrap().path()) {
            let file = path.file_name().unwrap().to_str().unwrap();
            let Some(prefix) = file.strip_suffix(suffix) else { continue };
            let prefix = if sub.is_empty() { format!("{prefix}_") } else { format!("{sub}/{prefix}_") };
            let sibling = all.iter().find(|f| f.name.starts_with(&prefix) && f.name.ends_with("_none"));
            let sibling = sibling.unwrap_or_else(|| panic!("{file} has no sidecar")).clone();
            found.push((path, sibling));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// Those that are made of attention caches.
const ATTENTION: [&str; 4] =
    ["llama_kv_cache", "llama_kv_cache_iswa", "llama_kv_cache_dsa", "llama_kv_cache_msa"];
const MEMORIES: [&str; 9] = [
    ATTENTION[0],
    ATTENTION[1],
    ATTENTION[2],
    ATTENTION[3],
    "llama_memory_recurrent",
    "llama_memory_hybrid",
    "llama_memory_hybrid_iswa",
    "llama_memory_hybrid_idx",
    "llama_kv_cache_dsv4",
];

impl Fixture {
    fn open(root: &Path, sub: &str, json: &Path) -> Option<Self> {
        let name = format!("{sub}{}", json.file_stem()?.to_str()?);
        let text = fs::read(json).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        if !MEMORIES.contains(&value["memory"].as_str().unwrap_or_default()) {
            return None;
        }
        let sidecar: Sidecar = serde_json::from_value(value).unwrap_or_else(|e| panic!("{name}.json: {e}"));
        // A partial state has nothing of full attention.
        let whole = json.with_file_name(json.file_name()?.to_str()?.replace("_partial", "_none"));
        let cache = match fs::read(whole) {
            Ok(text) => serde_json::from_slice::<Sidecar>(&text).unwrap().sections,
            Err(_) => sidecar.sections.clone(),
        };
        Some(Self { root: root.to_owned(), name, sidecar, cache })
    }

    /// The fixture's file with this extension, if it is there.
    pub fn path(&self, extension: &str) -> Option<PathBuf> {
        Some(self.root.join(format!("{}.{extension}", self.name))).filter(|path| path.exists())
    }

    /// The blob, if it is there.
    pub fn blob(&self) -> Option<Vec<u8>> {
        self.path("bin").map(|path| fs::read(path).unwrap())
    }

    /// Version of the sequence layout: 2, 3 or 4.
    pub fn version(&self) -> u32 {
        self.sidecar.state_seq_version.unwrap_or(4)
    }

    /// Of a layout before the current one.
    pub fn is_old(&self) -> bool {
        self.version() < 4
    }

    /// It differs from b11434's in the last bits of its numbers.
    pub fn was_computed_otherwise(&self) -> bool {
        self.name.contains("mamba") || self.name.starts_with("v2/qwen3next")
    }

    /// The blob that an old state is in the current layout: b11434's, or the old one with the fields that it lacks.
    pub fn as_version_4(&self) -> Vec<u8> {
        if !self.was_computed_otherwise() {
            let path = self.path("bin").or_else(|| self.path("slot")).unwrap().with_extension("bin");
            let twin = self.twin_of(&path).unwrap_or_else(|| panic!("{} has no twin", self.name));
            return fs::read(twin).unwrap();
        }
        let mut blob = self.blob().unwrap();
        if self.sidecar.sections[0].is_attention() {
            // Header, n_stream, cell_count, cells, v_trans and n_layer; then n_rot_k and n_rot_v.
            let at = 8 + 4 + 4 + 12 * self.sidecar.sections[0].cells[0] as usize + 8;
            blob.splice(at..at, [0; 8]);
        }
        blob
    }

    pub fn flags(&self) -> StateFlags {
        StateFlags::from_bits(self.sidecar.flags).unwrap()
    }

    pub fn is_partial(&self) -> bool {
        self.flags().contains(StateFlags::PARTIAL_ONLY)
    }

    pub fn is_iswa(&self) -> bool {
        self.sidecar.memory == "llama_kv_cache_iswa"
    }

    /// Whether all sections are attention caches.
    pub fn is_attention(&self) -> bool {
        ATTENTION.contains(&&*self.sidecar.memory)
    }

    /// Full attention in a partial state: only older builds of llama.cpp wrote it.
    pub fn is_legacy_partial(&self) -> bool {
        self.is_partial() && self.sidecar.sections.iter().any(Section::is_full_attention)
    }

    /// Smallest and largest position after a restore.
    pub fn restored_positions(&self) -> (Pos, Pos) {
        let s = &self.sidecar;
        (s.restore.pos_min.unwrap_or(s.pos_min), s.restore.pos_max.unwrap_or(s.pos_max))
    }

    /// What llama.cpp's own `set_data` returned.
    pub fn set_data_return(&self) -> usize {
        self.sidecar.restore.set_data
    }

    /// Cells that a stream must have for this state.
    pub fn n_cells(&self) -> u32 {
        self.sidecar.sections.iter().flat_map(|section| &section.cells).copied().max().unwrap_or(0)
    }

    /// Cells of a stream in the context that wrote the state.
    pub fn kv_size(&self) -> u32 {
        let s = &self.sidecar;
        s.n_ctx_seq.unwrap_or(if s.kv_unified { s.n_ctx } else { s.n_ctx / s.n_seq_max })
    }

    /// The attention caches of the memory that the state is of, with streams of `kv_size` cells.
    pub fn sections(&self, kv_size: u32) -> Vec<KvParams> {
        let attention = self.cache.iter().filter(|section| section.is_attention());
        let mut sections: Vec<_> = attention.map(|section| self.section(section, kv_size)).collect();
        // Without the whole state beside it, a partial state does not say what the full-attention half is.
        if self.is_iswa() && sections.len() == 1 {
            let mut base = sections[0].clone();
            base.swa = Swa::NONE;
            sections.insert(0, base);
        }
        sections
    }

    /// All sections of the memory, attention caches as `change` leaves them.
    pub fn sections_with(&self, kv_size: u32, change: impl Fn(&mut KvParams)) -> Vec<SectionParams> {
        let mirrors = |name: &str| {
            let is_source = |section: &Section| ["mla", "base", "attn"].contains(&&*section.name);
            ["lid", "idx"].contains(&name).then(|| self.cache.iter().position(is_source).expect("a source"))
        };
        let change = |mut kv: KvParams| {
            change(&mut kv);
            kv.into()
        };
        if self.is_iswa() {
            return self.sections(kv_size).into_iter().map(change).collect();
        }
        let section = |section: &Section| {
            if section.is_attention() {
                change(KvParams { mirrors: mirrors(&section.name), ..self.section(section, kv_size) })
            } else {
                section.recurrent().into()
            }
        };
        let sections = self.cache.iter().filter(|section| !section.is_of_dsv4()).map(section);
        sections.chain(self.dsv4(kv_size)).collect()
    }

    pub fn is_dsv4(&self) -> bool {
        self.sidecar.memory == "llama_kv_cache_dsv4"
    }

    /// The compressed half of a DSV4 memory.
    fn dsv4(&self, kv_size: u32) -> Option<SectionParams> {
        let of = |kind: &str, name: &str| {
            self.cache.iter().find(|section| section.kind == kind && section.name == name)
        };
        let compressor = |name: &str| {
            let (k, state) = (of("dsv4_k_cache", name)?, of("dsv4_compressor", name)?);
            let number = |value: &serde_json::Value| value.as_u64().expect("a number");
            let layer = &k.layers[0][1];
            let ggml_type = i32::try_from(number(&layer["type"])).unwrap();
            Some(Dsv4CompressorParams {
                ratio: state.ratio,
                kv_size: kv_size.div_ceil(state.ratio),
                layers: k.layers.iter().map(|layer| u32::try_from(number(&layer[0])).unwrap()).collect(),
                k: tensor(ggml_type, number(&layer["rowbytes"])),
                state_size: state.state_size,
                n_embd_state: state.n_embd_state,
            })
        };
        let dsv4 = Dsv4Params {
            csa: compressor("csa")?,
            hca: compressor("hca")?,
            lid: compressor("lid")?,
            n_rs_seq: 0,
        };
        Some(SectionParams::Dsv4 { dsv4, memory: Dsv4Memory::Host })
    }

    /// The sections that a partial state holds.
    pub fn sections_of_state(&self) -> Vec<SectionParams> {
        let section = |section: &Section| {
            if section.is_attention() {
                self.section(section, self.kv_size()).into()
            } else {
                section.recurrent().into()
            }
        };
        self.sidecar.sections.iter().map(section).collect()
    }

    /// A section as the sidecar describes it.
    pub fn section(&self, section: &Section, kv_size: u32) -> KvParams {
        let s = &self.sidecar;
        let any = tensor(0, 4);
        let mut kv = KvParams::new(kv_size, 0, LayerParams { k: any, v: None });
        kv.layers = self.layers(section);
        kv.swa = Swa::new(SwaType::from_u32(section.swa_type).unwrap(), section.n_swa).unwrap();
        kv.v_trans = section.v_trans.unwrap_or(s.v_trans) != 0;
        kv.cell_ext = section.cell_ext;
        [kv.n_rot_k, kv.n_rot_v] = match &s.n_rot_true {
            // A partial state's sidecar speaks of its own sections only; no fixture leaves out a rotated one.
            Some(by_name) => by_name.get(&section.name).copied().unwrap_or_default(),
            None => [section.n_rot_k.unwrap_or(0), section.n_rot_v.unwrap_or(0)],
        };
        kv
    }

    fn layers(&self, section: &Section) -> Vec<LayerParams> {
        let s = &self.sidecar;
        let Some(k) = &section.k_type_rowbytes else {
            let tensor = |type_name: &str, n_embd: u32| TensorParams {
                ggml_type: GgmlType::KV.into_iter().find(|t| t.name() == type_name).unwrap(),
                n_embd,
            };
            let layers = s.n_embd_k_gqa.iter().zip(&s.n_embd_v_gqa);
            return layers
                .map(|(&k, &v)| LayerParams { k: tensor(&s.type_k, k), v: Some(tensor(&s.type_v, v)) })
                .collect();
        };
        let tensor = |&(number, row_size): &(i32, u64)| tensor(number, row_size);
        let v = |layer: usize| section.v_type_rowbytes.as_ref().map(|v| tensor(&v[layer]));
        k.iter().enumerate().map(|(layer, k)| LayerParams { k: tensor(k), v: v(layer) }).collect()
    }

    /// Whether the rotation of an old file must be stated: K or V is quantised.
    pub fn must_state_rotation(&self) -> bool {
        let quantized = |tensor: TensorParams| tensor.ggml_type.is_quantized();
        let layer = |layer: &LayerParams| quantized(layer.k) || layer.v.is_some_and(quantized);
        self.version() < 4 && self.sections(1).iter().any(|kv| kv.layers.iter().any(layer))
    }

    /// What is true of the rotation of an old file, where it must be stated.
    pub fn rotation(&self) -> Option<LegacyRotation> {
        let rotated = self.sections(1).iter().any(|kv| kv.n_rot_k != 0 || kv.n_rot_v != 0);
        let truth = if rotated { LegacyRotation::Rotated } else { LegacyRotation::Plain };
        self.must_state_rotation().then_some(truth)
    }

    /// A context like the one that wrote the state.
    pub fn params(&self) -> ContextParams {
        self.params_with(self.sidecar.n_seq_max, self.sidecar.kv_unified, self.kv_size())
    }

    /// A context of the state's sections with other sequences and sizes.
    pub fn params_with(&self, n_seq_max: u32, unified: bool, kv_size: u32) -> ContextParams {
        let mut params = ContextParams::new(n_seq_max, self.sections_with(kv_size, |_| ()));
        // DSV4 has one stream for each sequence.
        params.unified = unified && !self.is_dsv4();
        params.arch.clone_from(&self.sidecar.arch);
        params.legacy_rotation = self.rotation();
        params
    }

    /// An empty context like the one that wrote the state.
    pub fn context(&self) -> Context {
        place::context(self.params()).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// b11434's version of the file at `path` of an older build: in `v4_twins`, or in the main folder.
    pub fn twin_of(&self, path: &Path) -> Option<PathBuf> {
        let file = path.file_name().unwrap();
        [self.root.join("v4_twins").join(file), self.root.join(file)].into_iter().find(|twin| twin.exists())
    }
}

/// The state of a sequence; its size is the one that was announced.
pub fn seq_state(ctx: &mut Context, seq_id: SeqId, flags: StateFlags) -> Vec<u8> {
    let size = usize::try_from(ctx.state_seq_get_size(seq_id, flags).unwrap()).unwrap();
    let mut blob = vec![0; size];
    assert_eq!(ctx.state_seq_get_data(&mut blob, seq_id, flags).unwrap(), size);
    blob
}

/// The state of the whole context; its size is the one that was announced.
pub fn whole_state(ctx: &mut Context) -> Vec<u8> {
    let size = usize::try_from(ctx.state_get_size().unwrap()).unwrap();
    let mut state = vec![0; size];
    assert_eq!(ctx.state_get_data(&mut state).unwrap(), size);
    state
}

/// A scratch file with these bytes.
pub fn file_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    file
}

pub fn saved_slot(ctx: &mut Context, seq_id: SeqId, tokens: &[Token]) -> Vec<u8> {
    saved(|path| ctx.state_seq_save_file(path, seq_id, tokens))
}

pub fn saved_session(ctx: &mut Context, tokens: &[Token]) -> Vec<u8> {
    saved(|path| ctx.state_save_file(path, tokens))
}

fn saved(save: impl FnOnce(&Path) -> kvstate::error::Result<u64>) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("saved");
    let size = save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, size, "the size returned is the size of the file");
    bytes
}

/// First and last position of a sequence.
pub fn positions(ctx: &Context, seq_id: SeqId) -> (Pos, Pos) {
    (ctx.seq_pos_min(seq_id).unwrap(), ctx.seq_pos_max(seq_id).unwrap())
}

/// The magic numbers of files: of a sequence, of a whole context.
pub const SEQUENCE: u32 = 0x6767_7371;
pub const SESSION: u32 = 0x6767_736e;

/// A file of `version` whose token list and state are these.
pub fn file_bytes(magic: u32, version: u32, tokens: &[Token], state: &[u8]) -> Vec<u8> {
    let n_tokens = u32::try_from(tokens.len()).unwrap();
    let mut bytes: Vec<u8> = [magic, version, n_tokens].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes.extend(state);
    bytes
}

/// Panics with the place of the first difference, not with the bytes.
#[track_caller]
pub fn assert_same_bytes(got: &[u8], want: &[u8], what: &str) {
    if got == want {
        return;
    }
    let at = got.iter().zip(want).position(|(a, b)| a != b).unwrap_or(got.len().min(want.len()));
    panic!("{what}: {} bytes instead of {}, the first that differs is at {at}", got.len(), want.len());
}
