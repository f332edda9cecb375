//! A file of one layout, and types of K and V, made into one of another.

use std::path::Path;

use crate::context::{Context, ContextParams};
use crate::error::{Error, Result};
use crate::format::{Checkpoint, GgmlType, StateVersion, Tag};
use crate::inspect::{
    self, Basis, DataHeader, Description, Inspected, Kind, Section, Shape, State, Stream, Tensor,
};
use crate::memory::{
    KvParams, LayerParams, LegacyRotation, RecurrentLayerParams, RecurrentParams, SectionParams, TensorParams,
};
use crate::session::{DraftOutcome, SlotContents, SlotLoadParams, Verify};
use crate::types::{MAX_SEQ, Seq, SeqId, StateFlags};

/// What a file is to be converted to. `None`: as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConvertParams {
    /// Whether V is transposed.
    pub v_trans: Option<bool>,
    /// Type of K, in every section of attention.
    pub type_k: Option<GgmlType>,
    /// Type of V.
    pub type_v: Option<GgmlType>,
    /// Rotation of K; 0 if K is quantised no more and nothing else is said.
    pub n_rot_k: Option<u32>,
    /// Rotation of V; 0 if V is quantised no more and nothing else is said.
    pub n_rot_v: Option<u32>,
    /// What files older than version 4 leave open.
    pub legacy_rotation: Option<LegacyRotation>,
}

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Its bytes.
    pub bytes: u64,
    /// What was converted, and what of the old file is missing or damaged, in words.
    pub notes: Vec<String>,
}

/// Writes the file `from`, which is what was inspected, to `to` in the newest version, with K and V as `params` say: target, draft
/// and checkpoints. What else is in it stays: tokens, the driver's state, the identity. `to` may be `from`.
///
/// # Errors
/// [`Error::InvalidArgument`] for a state in memory, one that is not understood, and for memories whose states do not say enough
/// (DSV4; recurrent layers in a file with appendices and without a geometry); as [`Context::slot_load`] and
/// [`Context::slot_save`]. A file that was there is untouched then.
pub fn convert(
    from: impl AsRef<Path>,
    inspected: Inspected<'_>,
    to: impl AsRef<Path>,
    params: &ConvertParams,
) -> Result<Converted> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let Description { kind, appendices, state, .. } = inspected.description;
    match kind {
        Kind::SessionFile => {
            let arch = inspected.description.arch.clone().unwrap_or_default();
            // As many sequences as there may be; of those with streams of their own, as many as there are.
            let unified = n_stream(state) == 1;
            let n_seq_max = if unified { MAX_SEQ } else { n_stream(state) };
            let context = ContextParams { n_seq_max, unified, arch, ..context_params(state, params)? };
            let mut target = Context::new(context)?;
            let loaded = target.state_load_file(from, usize::MAX)?;
            let bytes = target.state_save_file(to, &loaded.tokens)?;
            Ok(Converted { bytes, notes: Vec::new() })
        }
        Kind::SequenceFile if appendices.parts.is_empty() && appendices.damage.is_empty() => {
            let seq_id = seq_id_of(inspected);
            let mut target = context_of(state, seq_id, params)?;
            let slot = target.slot_load(from, seq_id, SlotLoadParams::default())?;
            let bytes = target.state_seq_save_file(to, seq_id, &slot.tokens)?;
            Ok(Converted { bytes, notes: slot.notes })
        }
        Kind::SequenceFile => slot_file(from, inspected, to, params),
        Kind::SequenceState | Kind::ContextState => {
            let kind = kind.name();
            Err(Error::arg(
                "from",
                format!("a {kind} without the header of a file; only files are converted"),
            ))
        }
    }
}

/// A file with appendices.
fn slot_file(from: &Path, inspected: Inspected<'_>, to: &Path, params: &ConvertParams) -> Result<Converted> {
    let Inspected { input, description } = inspected;
    let seq_id = seq_id_of(inspected);
    let mut target = context_of(&description.state, seq_id, params)?;
    let appendices = &description.appendices;
    // The layers of recurrent states are in the geometry alone, which a file with appendices is written with.
    let has_recurrent =
        description.state.sections.iter().any(|section| matches!(section.shape, Shape::Recurrent { .. }));
    if has_recurrent && appendices.integrity.is_none() {
        return Err(Error::arg("from", "does not say which layers are recurrent"));
    }
    let blob = appendices.draft.as_ref().map(|state| state.draft.clone()).filter(|blob| !blob.is_empty());
    let context_of_draft = |range| {
        let input = slice(input, &range)?;
        context_of_blob(Inspected { input, description: &inspect::blob(input)? }, params)
    };
    let mut draft = blob.map(context_of_draft).transpose()?;
    let identity =
        appendices.integrity.as_ref().map(|integrity| integrity.identity.clone()).unwrap_or_default();
    let slot = target.slot_load(
        from,
        seq_id,
        SlotLoadParams {
            n_ctx_checkpoints: usize::MAX,
            draft: draft.as_mut().map(|(draft, seq_id)| (draft, *seq_id)),
            identity: identity.clone(),
            verify: Verify::Full,
            ..SlotLoadParams::default()
        },
    )?;
    let mut notes = slot.notes;
    if let DraftOutcome::Dropped(reason) = &slot.draft {
        notes.push(format!("the draft state is dropped: {reason}"));
    }
    let converted = |(i, Checkpoint { span, target, draft, driver }): (usize, Checkpoint<Vec<u8>>)| {
        let target = convert_blob(target, &format!("checkpoint {i}, target"), params)?;
        let draft = convert_blob(draft, &format!("checkpoint {i}, draft"), params)?;
        Ok(Checkpoint { span, target, draft, driver })
    };
    let checkpoints = slot.checkpoints.into_iter().enumerate().map(converted).collect::<Result<Vec<_>>>()?;
    let contents = SlotContents {
        tokens: &slot.tokens,
        checkpoints: checkpoints.iter().map(borrowed).collect(),
        draft: draft
            .as_mut()
            .filter(|_| matches!(slot.draft, DraftOutcome::Restored(_)))
            .map(|(draft, seq_id)| (draft, *seq_id)),
        driver: slot.driver.as_deref().unwrap_or_default(),
        identity,
        sidecar: false,
    };
    Ok(Converted { bytes: target.slot_save(to, seq_id, contents)?, notes })
}

fn borrowed(checkpoint: &Checkpoint<Vec<u8>>) -> Checkpoint<&[u8]> {
    let Checkpoint { span, target, draft, driver } = checkpoint;
    Checkpoint { span: *span, target, draft, driver }
}

fn slice<'a>(input: &'a [u8], range: &std::ops::Range<u64>) -> Result<&'a [u8]> {
    let place = |at: u64| usize::try_from(at).ok();
    let found = place(range.start).zip(place(range.end)).and_then(|(start, end)| input.get(start..end));
    found.ok_or_else(|| Error::arg("from", "is shorter than when it was inspected"))
}

/// A blob of an appendix, called `name`. A partial one holds some of the sections: it is the whole state of a memory of just these.
fn convert_blob(blob: Vec<u8>, name: &str, params: &ConvertParams) -> Result<Vec<u8>> {
    let is_empty = blob.is_empty() || blob.len() as u64 == crate::format::SEQ_BLOB_HEADER_LEN;
    if is_empty {
        return Ok(blob);
    }
    let refused = |reason: String| Error::arg("from", format!("{name}: {reason}"));
    let description = inspect::blob(&blob).map_err(|error| refused(error.to_string()))?;
    if description.state.version != StateVersion::CURRENT {
        let version = description.state.version.seq_version();
        return Err(refused(format!("of version {version}, which cannot be restored")));
    }
    let (mut context, seq_id) =
        context_of_blob(Inspected { input: &blob, description: &description }, params)?;
    context.state_seq_set_data(&blob, seq_id, StateFlags::empty())?;
    let size = context.state_seq_get_size(seq_id, StateFlags::empty())?;
    let mut out =
        vec![0; usize::try_from(size).map_err(|_| Error::OutOfMemory { what: "a checkpoint", bytes: size })?];
    context.state_seq_get_data(&mut out, seq_id, StateFlags::empty())?;
    Ok(out)
}

/// An empty context of as many streams as the state was written by, which takes it under the name that it has there.
fn context_of(state: &State, seq_id: SeqId, params: &ConvertParams) -> Result<Context> {
    let n_stream = n_stream(state);
    let n_seq_max = n_stream.max(seq_id.unsigned_abs() + 1);
    let unified = n_stream == 1;
    Context::new(ContextParams { n_seq_max, unified, ..context_params(state, params)? })
}

fn context_of_blob(inspected: Inspected<'_>, params: &ConvertParams) -> Result<(Context, SeqId)> {
    let seq_id = seq_id_of(inspected);
    Ok((context_of(&inspected.description.state, seq_id, params)?, seq_id))
}

/// The sequence that a state says it is of, in its cells or its header: readers ignore it, but it stays what it was. 0 if no context
/// can have it.
fn seq_id_of(Inspected { input, description }: Inspected<'_>) -> SeqId {
    let sections = description.state.sections.iter();
    let mut cells = sections
        .flat_map(|section| section.streams.iter().flat_map(move |stream| section.cells(stream, input)));
    let of_cells = cells.find_map(|cell| cell.seq_ids().next());
    let seq_id = of_cells.or(description.seq_id);
    seq_id.filter(|&seq_id| Seq::new(seq_id, MAX_SEQ).is_some()).unwrap_or(0)
}

fn n_stream(state: &State) -> u32 {
    let n_stream = state.sections.iter().map(|section| section.streams.len()).max();
    n_stream.map_or(1, |n| u32::try_from(n).unwrap_or(MAX_SEQ)).max(1)
}

fn context_params(state: &State, params: &ConvertParams) -> Result<ContextParams> {
    if let Basis::Incomplete { reason } = &state.basis {
        return Err(Error::arg("from", format!("its memory state is not understood: {reason}")));
    }
    let streams = || state.sections.iter().flat_map(|section| &section.streams);
    let n_cells = streams().map(|stream| stream.n_cells).max().unwrap_or(0).max(1);
    let sections = state.sections.iter().map(|section| section_params(section, n_cells, params));
    Ok(ContextParams {
        convert_types: true,
        legacy_rotation: params.legacy_rotation,
        ..ContextParams::new(1, sections.collect::<Result<_>>()?)
    })
}

fn section_params(section: &Section, n_cells: u32, params: &ConvertParams) -> Result<SectionParams> {
    match &section.shape {
        Shape::Attention { cell_ext, data } => {
            let layers = match section.streams.iter().find(|stream| !stream.tensors.is_empty()) {
                Some(stream) => layers(stream)?,
                None => Vec::new(),
            };
            Ok(attention(layers, *data, !cell_ext.is_empty(), n_cells, params)?.into())
        }
        Shape::Recurrent { n_layer } => Ok(recurrent(section, *n_layer)?.into()),
        Shape::Shared => Ok(SectionParams::Shared),
        Shape::Dsv4 { .. } => Err(Error::arg("from", "holds a DSV4 memory, which is not converted")),
    }
}

fn attention(
    mut layers: Vec<LayerParams>,
    data: Option<DataHeader>,
    cell_ext: bool,
    kv_size: u32,
    params: &ConvertParams,
) -> Result<KvParams> {
    let was_quantized =
        |tensor: Option<TensorParams>| tensor.is_some_and(|tensor| tensor.ggml_type.is_quantized());
    let before = layers.first().map(|layer| (was_quantized(Some(layer.k)), was_quantized(layer.v)));
    for LayerParams { k, v } in &mut layers {
        k.ggml_type = params.type_k.unwrap_or(k.ggml_type);
        if let Some(v) = v {
            v.ggml_type = params.type_v.unwrap_or(v.ggml_type);
        }
    }
    let after = layers.first().map(|layer| (was_quantized(Some(layer.k)), was_quantized(layer.v)));
    let rotation = |wanted: Option<u32>, own: Option<u32>, is_plain_now: bool| {
        wanted.unwrap_or(if is_plain_now { 0 } else { own.unwrap_or(0) })
    };
    for LayerParams { k, v } in &layers {
        for (field, n_rot, n_embd) in
            [("n_rot_k", params.n_rot_k, k.n_embd), ("n_rot_v", params.n_rot_v, v.map_or(0, |v| v.n_embd))]
        {
            if let Some(n_rot) = n_rot.filter(|&n_rot| n_rot != 0 && !n_embd.is_multiple_of(n_rot)) {
                return Err(Error::arg(field, format!("{n_rot}, which does not divide rows of {n_embd}")));
            }
        }
    }
    let [own_k, own_v] = data.map_or([None; 2], |data| [data.n_rot_k, data.n_rot_v]);
    let (before, after) = (before.unwrap_or_default(), after.unwrap_or_default());
    Ok(KvParams {
        layers,
        v_trans: params.v_trans.unwrap_or(data.is_some_and(|data| data.v_trans)),
        n_rot_k: rotation(params.n_rot_k, own_k, before.0 && !after.0),
        n_rot_v: rotation(params.n_rot_v, own_v, before.1 && !after.1),
        cell_ext,
        ..KvParams::new(kv_size, 0, LayerParams { k: NOTHING, v: None })
    })
}

const NOTHING: TensorParams = TensorParams { ggml_type: GgmlType::F16, n_embd: 0 };

const K: Tag = Tag(*b"K   ");
const R: Tag = Tag(*b"R   ");
const P: Tag = Tag(*b"P   ");

fn tensor_params(tensor: &Tensor) -> Result<TensorParams> {
    let n_embd = u32::try_from(tensor.n_embd());
    let n_embd = n_embd.map_err(|_| Error::arg("from", format!("rows of {} bytes", tensor.row_size)))?;
    Ok(TensorParams { ggml_type: tensor.ggml_type, n_embd })
}

fn layers(stream: &Stream) -> Result<Vec<LayerParams>> {
    let (k, v): (Vec<_>, Vec<_>) = stream.tensors.iter().partition(|tensor| tensor.tag == K);
    let mut layers = Vec::with_capacity(k.len());
    for k in &k {
        layers.push(LayerParams { k: tensor_params(k)?, v: None });
    }
    for (i, tensor) in v.iter().enumerate() {
        // Where no layer is named, all have one.
        let layer = tensor.layer.map_or(i, |layer| layer as usize);
        let layer = layers
            .get_mut(layer)
            .ok_or_else(|| Error::arg("from", format!("V of layer {layer} without K")))?;
        layer.v = Some(tensor_params(tensor)?);
    }
    Ok(layers)
}

fn recurrent(section: &Section, n_layer: u32) -> Result<RecurrentParams> {
    let mut params = RecurrentParams::default();
    params.layers.resize(n_layer as usize, RecurrentLayerParams::default());
    let mut next = [0; 2];
    for tensor in section.streams.iter().flat_map(|stream| &stream.tensors) {
        let next = &mut next[usize::from(tensor.tag != R && tensor.tag != P)];
        // In the order of the layers, wherever their numbers are not known.
        let at = tensor.layer.map_or(*next, |layer| layer as usize);
        let at = if tensor.tag == P { at.saturating_sub(usize::from(tensor.layer.is_none())) } else { at };
        let layer = params.layers.get_mut(at);
        let layer =
            layer.ok_or_else(|| Error::arg("from", format!("states of more than {n_layer} layers")))?;
        match tensor.tag {
            P => layer.p = Some(tensor_params(tensor)?.n_embd),
            R => layer.r = Some(tensor_params(tensor)?),
            _ => layer.s = Some(tensor_params(tensor)?),
        }
        if tensor.tag != P {
            *next = at + 1;
        }
    }
    Ok(params)
}
