//! Scratch.
#![allow(unsafe_code)]
use kvstate::storage::*;
use std::sync::Arc;
use std::time::Instant;
fn best(v: &[f64]) -> f64 {
    v.iter().copied().fold(0.0, f64::max)
}
fn med(v: &mut Vec<f64>) -> f64 {
    v.sort_by(|a, b| a.partial_cmp(b).unwrap());
    v[v.len() / 2]
}
fn small() {
    let n = 8000u32;
    let kv = 17024;
    for elem in [1u32, 2, 4] {
        for (name, cells) in [
            ("alt", (0..n).map(|c| 2 * c).collect::<Vec<_>>()),
            ("runs16", (0..2 * n).filter(|c| c / 16 % 2 == 0).collect()),
        ] {
            let shape = PlaneShape::dense_channels(16 / elem, elem, kv);
            let mut planes = Plane::allocate(&[shape], kv).unwrap();
            unsafe {
                planes[0].as_ptr().write_bytes(3, shape.span(kv).unwrap() as usize);
            }
            let map = Arc::new(CellMap::of_cells(&cells).unwrap());
            let per = n as usize * shape.cell_bytes() as usize;
            let mut out = vec![1u8; per];
            let src = vec![2u8; per];
            let (mut g, mut s) = (vec![], vec![]);
            for _ in 0..200 {
                let t = Instant::now();
                gather(&[(0, Region::new(&planes[0], &map).unwrap())], &mut out, Threads::new(1)).unwrap();
                g.push(per as f64 / t.elapsed().as_secs_f64() / 1e9);
                let t = Instant::now();
                scatter(
                    &mut [Scatter {
                        plane: &mut planes[0],
                        map: &map,
                        n_src: n,
                        src: TensorBytes::Memory(&src),
                    }],
                    Threads::new(1),
                    None,
                )
                .unwrap();
                s.push(per as f64 / t.elapsed().as_secs_f64() / 1e9);
            }
            println!(
                "{} elem {elem} {name} in cache: gather {:.1} GB/s scatter {:.1} GB/s",
                kernels(),
                med(&mut g),
                med(&mut s)
            );
        }
    }
}
fn main() {
    small();
    let reps: usize = std::env::args().nth(2).map_or(9, |s| s.parse().unwrap());
    let filter = std::env::args().nth(1).unwrap_or_default();
    let n = 8000u32;
    let mut x = 88172645463325252u64;
    let mut rnd = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let pats: Vec<(&str, Vec<u32>)> = vec![
        ("one run", (0..n).collect()),
        ("runs of 16", (0..2 * n).filter(|c| c / 16 % 2 == 0).collect()),
        ("alternate", (0..n).map(|c| 2 * c).collect()),
        ("random half", {
            let mut v: Vec<u32> = (0..2 * n + 1000).filter(|_| rnd() & 1 == 0).collect();
            v.truncate(n as usize);
            v
        }),
    ];
    println!("{}", kernels());
    for (shape_name, layers, mk) in
        [("rows 2K", 32usize, 0), ("trans f16", 32, 2), ("trans f32", 16, 4), ("rows 34*32", 64, 1088)]
    {
        for (name, cells) in &pats {
            let label = format!("{shape_name} {name}");
            if !label.contains(&filter) {
                continue;
            }
            let kv = 17024;
            let shape = match mk {
                0 => PlaneShape::dense_rows(2048),
                2 => PlaneShape::dense_channels(1024, 2, kv),
                4 => PlaneShape::dense_channels(1024, 4, kv),
                r => PlaneShape::dense_rows(r),
            };
            let mut planes = Plane::allocate(&vec![shape; layers], kv).unwrap();
            let map = Arc::new(CellMap::of_cells(cells).unwrap());
            let per = n as usize * shape.cell_bytes() as usize;
            let total = per * layers;
            for p in &planes {
                unsafe {
                    p.as_ptr().write_bytes(3, p.shape().span(kv).unwrap() as usize);
                }
            }
            #[allow(unused_mut)]
            let mut out = vec![1u8; total + 64];
            let mut src = vec![2u8; total];
            src[5] = 1;
            for threads in [1, 2] {
                let (mut g, mut s, mut gb, mut sb, mut mb) = (vec![], vec![], vec![], vec![], vec![]);
                for _ in 0..reps {
                    let t = Instant::now();
                    out[..total].copy_from_slice(&src);
                    let m = t.elapsed().as_secs_f64();
                    let batch: Vec<_> = planes
                        .iter()
                        .enumerate()
                        .map(|(i, p)| ((8 + i * per) as u64, Region::new(p, &map).unwrap()))
                        .collect();
                    let t = Instant::now();
                    gather(&batch, &mut out, Threads::new(threads)).unwrap();
                    g.push(m / t.elapsed().as_secs_f64());
                    gb.push(total as f64 / t.elapsed().as_secs_f64() / 1e9);
                    mb.push(total as f64 / m / 1e9);
                    drop(batch);
                    let t = Instant::now();
                    out[..total].copy_from_slice(&src);
                    let m = t.elapsed().as_secs_f64();
                    let mut batch: Vec<_> = planes
                        .iter_mut()
                        .enumerate()
                        .map(|(i, plane)| Scatter {
                            plane,
                            map: &map,
                            n_src: n,
                            src: TensorBytes::Memory(&src[i * per..][..per]),
                        })
                        .collect();
                    let t = Instant::now();
                    scatter(&mut batch, Threads::new(threads), None).unwrap();
                    s.push(m / t.elapsed().as_secs_f64());
                    sb.push(total as f64 / t.elapsed().as_secs_f64() / 1e9);
                }
                let t = Instant::now();
                out[..total].copy_from_slice(&src);
                let m = total as f64 / t.elapsed().as_secs_f64() / 1e9;
                println!(
                    "{label:28} t{threads} gather {:.2} scatter {:.2}   best: memcpy {:.1} gather {:.1} = {:.2} scatter {:.1} = {:.2}",
                    med(&mut g),
                    med(&mut s),
                    best(&mb),
                    best(&gb),
                    best(&gb) / best(&mb),
                    best(&sb),
                    best(&sb) / best(&mb)
                );
                let _ = m;
            }
        }
    }
}
